"""Writes what keyhole is made of to dist/, as a CycloneDX file of version 1.6.

Everything in it comes from pyproject.toml and requirements.lock: keyhole, each package that it or
an extra needs, with version and SHA-256 of every file, and which package asks for which. Tools of
`dev` are not part of what is shipped and are left out, as is torch, which is not locked. The file
is checked against the schema before it is written, and the same lock gives the same bytes.
"""

from __future__ import annotations

import sys
import tomllib
import uuid
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

from build_wheel import date_of
from lock import LOCK, Locked, asked_for, name_of, pick

TREE = Path(__file__).resolve().parent.parent
_TOOLS = "dev"


def make_sbom(tree: Path, seconds: int) -> str:
    """Returns the text of the file, dated `seconds` in unix time; raises ValueError where it does
    not fit the schema."""
    asked = {name: of for name, of in asked_for(tree).items() if name != _TOOLS}
    direct = {name_of(one) for of in asked.values() for one in of}
    packages = pick(tree, list(asked))
    root = _root(tree)
    parts = {each.name: _component(each) for each in packages} | {root.name: root}
    bom = Bom(components=[part for part in parts.values() if part is not root])
    bom.metadata.component = root
    bom.metadata.timestamp = datetime.fromtimestamp(seconds, UTC)
    bom.serial_number = uuid.UUID(bytes=sha256((tree / LOCK).read_bytes()).digest()[:16], version=4)
    bom.register_dependency(root, [parts[name] for name in sorted(direct)])
    for each in packages:
        needed_by = [parts[parent] for parent in each.via if parent in parts.keys() - {root.name}]
        for parent in needed_by:
            bom.register_dependency(parent, [parts[each.name]])
    text = JsonV1Dot6(bom).output_as_string(indent=1) + "\n"
    if wrong := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise ValueError(f"not a CycloneDX file: got {wrong}; expected version 1.6; mend sbom.py")
    return text


def _root(tree: Path) -> Component:
    """keyhole itself."""
    told = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    name, version = told["name"], told["version"]
    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        description=told["description"],
        licenses=[DisjunctiveLicense(id=told["license"])],
        bom_ref=f"pkg:pypi/{name}@{version}",
        purl=PackageURL("pypi", None, name, version),
    )


def _component(package: Locked) -> Component:
    """One package, by its name, version and files."""
    purl = PackageURL("pypi", None, package.name, package.version)
    files = [HashType(alg=HashAlgorithm.SHA_256, content=one[7:]) for one in package.hashes]
    return Component(
        name=package.name,
        version=package.version,
        type=ComponentType.LIBRARY,
        bom_ref=str(purl),
        purl=purl,
        hashes=files,
    )


def main() -> int:
    """Writes the file; returns the exit code."""
    told = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]
    path = TREE / "dist" / f"{told['name']}-{told['version']}.cdx.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(make_sbom(TREE, date_of(TREE)))
    print(f"written: {path.relative_to(TREE)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
