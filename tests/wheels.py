"""Packages of one module, as pip installs them, and an index that has them."""

import hashlib
import zipfile


def write_wheel(folder, name, needs=(), code="", version="1.0"):
    """A wheel; returns its path."""
    info = f"{name}-{version}.dist-info"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    facts = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    facts += [f"Requires-Dist: {need}" for need in needs]
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", code)
        wheel.writestr(f"{info}/METADATA", "\n".join(facts) + "\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def write_index(folder, wheels):
    """A package index in files that lists wheels; returns its address."""
    for wheel in wheels:
        page = folder / wheel.name.partition("-")[0] / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        link = f"{wheel.as_uri()}#sha256={digest(wheel)}"
        with page.open("a") as listed:
            listed.write(f'<!DOCTYPE html><a href="{link}">{wheel.name}</a>')
    return folder.as_uri()


def digest(wheel):
    return hashlib.sha256(wheel.read_bytes()).hexdigest()
