"""API keys in files: what a document may say, what each key may use, and that nothing of it leaks or is lost."""

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from router_harness import SECRET, RunningRouter, post, raw_exchange, running_router, until
from scripted_worker import answer_whole, running_worker

from coda_engine.contract.identity import unpack
from coda_router import server
from coda_router.auth.documents import KeyDocument, hashed, new_key
from coda_router.auth.reading import read_api_keys
from coda_router.config import RouterConfig
from coda_router.errors import ConfigurationError
from coda_router.fleet.address import WorkerAddress


def write_key(folder: Path, name: str, key: str, **fields: Any) -> dict[str, str]:
    """Write a key's document, with the key only hashed; return the headers that carry the key."""
    (folder / name).write_text(json.dumps({"keyHash": hashed(key), **fields}))
    return {"authorization": f"Bearer {key}"}


async def test_a_key_may_be_kept_as_its_hash_and_a_tenant_may_have_several(tmp_path: Path):
    (tmp_path / "alice").write_text("plain-key-1\n")
    laptop = write_key(tmp_path, "alice-laptop", "hashed-key-1", tenant="alice")
    (tmp_path / "ci.json").write_text('{"key": "key-in-json"}')
    async with running_worker(script=answer_whole) as worker, running_router(worker, api_keys_dir=tmp_path) as router:
        for headers in ({"x-api-key": "plain-key-1"}, laptop, {"x-api-key": "key-in-json"}):
            assert (await router.chat(headers=headers))[0] == 200
        digest = hashlib.sha256(b"hashed-key-1").hexdigest()
        for wrong in (digest, f"sha256:{digest}", "hashed-key-2"):
            assert (await router.chat(headers={"x-api-key": wrong}))[0] == 401
    tenants = [unpack(request.headers["x-session-id"], SECRET).tenant for request in worker.requests]
    assert tenants == ["alice", "alice", "ci.json"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"keyHash": "sha256:00"}', "keyHash: string should match"),
        ('{"key": "too-few"}', "key: string should have at least 8"),
        ('{"key": "not in a header"}', "key: string should match"),
        ('{"tenant": "bob"}', "give either key or keyHash; coda key makes both"),
        ('{"key": "key-of-bob", "keyHash": "sha256:%s"}' % ("0" * 64), "give either key or keyHash"),
        ('{"key": "key-of-bob", "request_per_minute": 1}', "request_per_minute: unknown field; remove it"),
        ('{"key": "key-of-bob", "requests_per_minute": 1}', "requests_per_minute: unknown field"),
        ('{"key": "key-of-bob", "requestsPerMinute": 0}', "requestsPerMinute: input should be greater"),
        ('{"key": "key-of-bob", "maxConcurrentRequests": 1.5}', "maxConcurrentRequests: input should be a valid int"),
        ('{"key": "key-of-bob", "models": []}', "models: "),
        ('{"key": "key-of-bob", "tenant": "a/b"}', "tenant: string should match"),
        ('{"key": "key-of-bob"', "invalid JSON"),
        ('{"key": 12345678}', "key: input should be a valid string"),
        ("key-of-alice", "holds the same key as file 'alice'"),
        (json.dumps({"keyHash": hashed("key-of-alice")}), "holds the same key as file 'alice'"),
        ("", "the key has fewer than 8 characters"),
        ("two-keys-1\ntwo-keys-2\n", "put the key alone on one line"),
        ("words with spaces", "put the key alone on one line"),
        ('[{"key": "in-a-list-1"}]', "put the key alone on one line"),
        pytest.param("x" * 70_000, "larger than 65536 bytes", id="large"),
    ],
)
def test_a_file_that_is_no_key_is_named_with_its_field_and_no_key_is_repeated(
    tmp_path: Path, content: str, expected: str
):
    (tmp_path / "alice").write_text("key-of-alice")
    (tmp_path / "bob").write_text(content)
    with pytest.raises(ConfigurationError) as refused:
        read_api_keys(tmp_path)
    message = str(refused.value)
    assert message.startswith(f"--api-keys-dir {tmp_path}: file 'bob': ")
    assert expected in message
    assert len(message.splitlines()) == 1
    for secret in ("key-of-alice", "key-of-bob", "not in a header", "12345678", "xxxx"):
        assert secret not in message


def test_a_new_key_s_document_is_that_key():
    key = new_key()
    document = KeyDocument.parse(json.dumps({"keyHash": hashed(key)}).encode())
    assert document.sha256 == hashlib.sha256(key.encode()).digest()
    assert new_key() != key


async def test_a_secret_s_mount_is_a_folder_of_keys_and_its_change_is_noticed(tmp_path: Path):
    def mount(version: str, **files: str) -> None:
        """Swap the folder as Kubernetes does: links into a folder behind a link, which is replaced at once."""
        (tmp_path / version).mkdir()
        for name, content in files.items():
            (tmp_path / version / name).write_text(content)
            if not (tmp_path / name).is_symlink():
                (tmp_path / name).symlink_to(f"..data/{name}")
        (tmp_path / "..data_tmp").symlink_to(version)
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")

    mount("..2026_1", default="coda-first-key")
    async with running_worker() as worker, running_router(worker, api_keys_dir=tmp_path) as router:
        assert (await router.chat(headers={"x-api-key": "coda-first-key"}))[0] == 200
        mount("..2026_2", default="coda-second-key")
        await until_answered(router, {"x-api-key": "coda-second-key"})
        assert (await router.chat(headers={"x-api-key": "coda-first-key"}))[0] == 401


async def test_a_key_that_comes_between_reading_the_folder_and_watching_it_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_key(tmp_path, "alice", "key-of-alice")

    def read_while_it_changes(folder: Path) -> Any:
        monkeypatch.undo()
        keys = read_api_keys(folder)
        write_key(folder, "carol", "key-of-carol")
        return keys

    monkeypatch.setattr(server, "read_api_keys", read_while_it_changes)
    async with running_worker() as worker, running_router(worker, api_keys_dir=tmp_path) as router:
        await until_answered(router, {"x-api-key": "key-of-carol"})


@pytest.mark.parametrize(
    ("has_keys", "secret", "is_told"), [(True, None, True), (True, SECRET, False), (False, None, False)]
)
def test_keys_that_engines_cannot_keep_apart_are_told_with_the_remedy_at_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, has_keys: bool, secret: bytes | None, is_told: bool
):
    write_key(tmp_path, "alice", "key-of-alice")
    workers = (WorkerAddress("w", "127.0.0.1", 1),)
    server.Router(
        RouterConfig("127.0.0.1", 0, workers, api_keys_dir=tmp_path if has_keys else None, cluster_secret=secret)
    )
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == is_told
    assert all("--cluster-secret-file FILE" in text and "CODA_CLUSTER_SECRET_FILE" in text for text in told)


async def test_one_bad_file_leaves_all_former_keys_in_force_is_said_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    alice = write_key(tmp_path, "alice", "key-of-alice")
    async with running_worker() as worker, running_router(worker, api_keys_dir=tmp_path) as router:
        carol = write_key(tmp_path, "carol", "key-of-carol")
        (tmp_path / "bob").write_text('{"key": "key-of-bob-1", "modles": ["small"]}')
        await until(lambda: "file 'bob': modles: unknown field" in caplog.text)
        assert (await router.chat(headers=alice))[0] == 200
        assert (await router.chat(headers=carol))[0] == 401
        await asyncio.sleep(1.5)  # longer than the time between two looks
        assert caplog.text.count("changed but is not taken") == 1
        assert "key-of-bob" not in caplog.text
        assert 'coda_router_refused_reloads_total{file="ApiKeys"} 1.0' in (await router.get("/metrics"))[1]
        (tmp_path / "bob").unlink()
        await until_answered(router, carol)


@pytest.fixture
def choosy(tmp_path: Path) -> dict[str, str]:
    """A key that may use ``small`` and ``absent`` only; nobody serves the latter."""
    return write_key(tmp_path, "choosy", "key-of-choosy", models=["small", "absent"])


async def test_a_model_that_a_key_may_not_use_does_not_exist_for_it(tmp_path: Path, choosy: dict[str, str]):
    free = write_key(tmp_path, "free", "key-of-free")
    served = ["small", "secret"]
    async with running_worker(script=answer_whole, models=served) as worker:
        async with running_router(worker, api_keys_dir=tmp_path) as router:
            assert (await router.chat(model="secret", headers=free))[0] == 200
            assert (await router.chat(model="small", headers=choosy))[0] == 200
            hidden = await router.chat(model="secret", headers=choosy)
            unknown = await router.chat(model="nobody", headers=choosy)
            absent = await router.chat(model="absent", headers=choosy)
            hidden_page = await router.get("/v1/models/secret", headers=choosy)
            unknown_page = await router.get("/v1/models/nobody", headers=choosy)
            listed = [model["id"] for model in (await router.get("/v1/models", headers=choosy))[1]["data"]]
            everything = [model["id"] for model in (await router.get("/v1/models", headers=free))[1]["data"]]
    assert hidden[0] == unknown[0] == absent[0] == 404
    assert hidden[1].replace(b"secret", b"nobody") == unknown[1]
    assert json.loads(hidden[1])["error"]["code"] == "model_not_found"
    assert b"secret" not in absent[1]
    assert hidden_page[0] == 404
    assert json.loads(json.dumps(hidden_page).replace("secret", "nobody")) == list(unknown_page)
    assert (listed, everything) == (["small"], served)
    assert len(worker.requests) == 2


@pytest.mark.parametrize(
    "model",
    [
        b'"model":"small","model":"secret"',
        b'"model":"small","mod\\u0065l":"secret"',
        b'"\\u006dodel":"secret"',
        b'"model":""',
        b'"model":null',
        b'"Model":"small"',
        b'"x":1',
    ],
    ids=bytes.decode,
)
async def test_no_spelling_gets_around_the_models_that_a_key_may_use(
    tmp_path: Path, choosy: dict[str, str], model: bytes
):
    async with running_worker(models=["small", "secret"]) as worker:
        async with running_router(worker, api_keys_dir=tmp_path) as router:
            request = post("/v1/chat/completions", b"{%b}" % model, *(f"{k}: {v}" for k, v in choosy.items()))
            raw = await raw_exchange(router.port, request)
    assert raw.startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 400 "))
    assert json.loads(raw.partition(b"\r\n\r\n")[2])["error"]["param"] == "model"
    assert b"secret" not in raw or b"served: small" in raw
    assert not worker.requests


async def until_answered(router: RunningRouter, headers: dict[str, str]) -> None:
    """Wait until a key is in force."""
    async with asyncio.timeout(10):
        while (await router.chat(headers=headers))[0] != 200:
            await asyncio.sleep(0.05)
