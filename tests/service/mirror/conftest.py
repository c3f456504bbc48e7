"""Stores and rounds directories for the tests of mirroring."""

import os

import pytest

from tests.service.mirror.places import DENIED, Place, make_bucket, s3_server, s3_settings


@pytest.fixture(scope="session")
def s3_port(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as port:
        yield port


@pytest.fixture(autouse=True)
def no_settings_of_the_user(monkeypatch):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    # A machine in a cloud would be given credentials; nobody is asked here.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{DENIED}")


@pytest.fixture
def s3(s3_port, request):
    bucket = f"bucket-{abs(hash(request.node.nodeid))}"
    make_bucket(s3_port, bucket)
    return Place(f"s3://{bucket}/federated/select", s3_settings(s3_port))


@pytest.fixture(params=["s3", "file"])
def place(request, tmp_path):
    if request.param == "s3":
        return request.getfixturevalue("s3")
    return Place((tmp_path / "store").as_uri())


@pytest.fixture
def origin(tmp_path):
    (tmp_path / "origin").mkdir()
    return tmp_path / "origin"


@pytest.fixture
def edge(tmp_path):
    return tmp_path / "edge"
