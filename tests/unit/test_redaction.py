"""Secrets are hidden wherever they stand, and nothing else is."""

import logging

import pytest
import yaml

from cascade_train.config.groups import conf_dir
from cascade_train.redaction import (
    HIDDEN,
    LONGEST_LOGGED,
    printable,
    redact,
    redact_argument,
    redact_record,
    redacted,
    shortened,
)
from tests.growth import assert_linear

HUB = "hf_" + "aB3dE5gH7jK9mN1pQ2rS4tU6vW8xY0zA1b"
WANDB = "0123456789abcdef" * 2 + "01234567"
TEXTS = {
    f"weights from {HUB} here": HUB,
    "pipe:curl -H 'Authorization: Bearer abc123def456ghi7' https://a.b/c.tar": "abc123def456ghi7",
    'pipe:curl --header "authorization: token0815" https://a.b/c.tar': "token0815",
    "data.urls=https://anna:hunt@er2@a.b/c.tar": "hunt@er2",
    "https://a.b/c.tar?X-Amz-Date=20260101&X-Amz-Signature=0815abcd&part=3": "0815abcd",
    "https://a.b/c.tar?x=1&sig=abc%2Fdef%3D": "abc%2Fdef",
    "pipe:AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG/bPxRfiCYEX aws s3 cp s3://a/b -": "wJalrXUtnFEMI",
    "AKIAIOSFODNN7EXAMPLE": "AKIAIOSFODNN7EXAMPLE",
    "task.api_token=abcdef0123456789": "abcdef0123456789",
    "pipe:get --password hunter2 --out -": "hunter2",
    "pipe:get --api-token abcdef0123456789": "abcdef0123456789",
    '{"db_password": "hunter2"}': "hunter2",
    f"+task.wandb_api_key={WANDB}": WANDB,
    "a eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl b": "eyJzdWIiOiIxIn0",
    "ghp_" + "a1B2" * 9: "a1B2a1B2",
    "curl -H 'X-Api-Key: hunter2' https://a.b/c": "hunter2",
    "curl -H X-Auth-Token:hunter2 https://a.b/c": "hunter2",
    "curl --header 'PRIVATE-TOKEN: hunter2'": "hunter2",
    "PGPASSWORD=hunter2 psql": "hunter2",
    "MYSQL_PWD=hunter2 mysql": "hunter2",
    "https://a.b/c.tar?part=1&pwd=hunter2": "hunter2",
    "https://a.b/c.tar?key=hunter2": "hunter2",
    "https://a.b/c.tar?jwt=hunter2": "hunter2",
    "https://a.b/c.tar?access_token=hunter2": "hunter2",
    "the token: abcdef0123456789 was refused": "abcdef0123456789",
    "password: hunter2": "hunter2",
    "api_key: 'correct horse battery'": "horse",
    '{"password": "correct horse battery"}': "horse",
    r"{\"password\": \"hunter2\"}": "hunter2",
    "data.auth.pwd=hunter2": "hunter2",
    "get --bearer hunter2": "hunter2",
    "wandb_v1_" + "Ab3_" * 12: "Ab3_Ab3_",
}
HARMLESS = [
    "s3://bucket/folder/@home/000.tar",
    "shards/{000..005}.tar",
    "model.text_encoder.max_tokens=77",
    'task.train_tokens=[["[fernando]","^dog</w>"]]',
    "no token: conditionally dropped",
    "the secret: a garden, basic photograph, bearer of bad tidings",
    "pad_token=<pad>",
    f"revision {WANDB}",
    "owner/hf_internal-testing/tiny",
    "data.captions.key=caption",
    "mail anna@example.org",
    "https://a.b/c.tar?part=3&expand=all",
    "sk-learn-compatible-estimators",
    "a cookie: a recipe with 3 eggs",
    "data.captions.key={caption: 0.95, txt: 0.05}",
    "python -u train.py: started",
    "train_tokens: [fernando]",
    "pipe: a command",
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_secret_is_hidden_and_stays_so(text: str):
    shown = redact(text)
    assert TEXTS[text] not in shown
    assert HIDDEN in shown
    assert redact(shown) == shown


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_no_secret_stays(text: str):
    assert redact(text) == text


def test_what_surrounds_a_secret_stays():
    assert redact("https://anna:pw@a.b/c.tar?part=3&sig=abc") == f"https://{HIDDEN}@a.b/c.tar?part=3&sig={HIDDEN}"


def test_values_are_hidden_by_their_names():
    node = {
        "db": {"password": "short", "user": "anna", "pin_secret": 4711, "enabled": True},
        "token": WANDB,
        "secrets": ["one", "two"],
        "pad_token": "<pad>",
        "key": "caption",
        "steps": 3,
        "urls": ["https://a:b@c/d", None],
        "pwd": "tiger",
        "headers": {"bearer": "tiger", "X-Api-Key": "tiger", "cookies": ["tiger"]},
        "credentials": {"user": "anna"},
    }
    assert redacted(node) == {
        "db": {"password": HIDDEN, "user": "anna", "pin_secret": HIDDEN, "enabled": True},
        "token": HIDDEN,
        "secrets": [HIDDEN, HIDDEN],
        "pad_token": "<pad>",
        "key": "caption",
        "steps": 3,
        "urls": [f"https://{HIDDEN}@c/d", None],
        "pwd": HIDDEN,
        "headers": {"bearer": HIDDEN, "X-Api-Key": HIDDEN, "cookies": [HIDDEN]},
        "credentials": {"user": HIDDEN},
    }


def test_secret_variables_of_the_environment_are_hidden_wherever_they_come_up(monkeypatch):
    monkeypatch.setenv("MY_DB_PASSWORD", "correct horse battery")
    monkeypatch.setenv("PASSWORD", "short")
    monkeypatch.setenv("DATA_ROOT", "/data/of/the/group")
    assert (
        redact("evil/correct horse battery, /data/of/the/group, short") == f"evil/{HIDDEN}, /data/of/the/group, short"
    )


def test_nothing_in_the_own_configuration_counts_as_a_secret():
    files = sorted(conf_dir().rglob("*.yaml"))
    assert len(files) > 40
    for file in files:
        content = yaml.safe_load(file.read_text())
        assert redacted(content) == content, file


def test_two_urls_that_differ_in_more_than_the_secret_stay_different():
    one, two = ({"urls": [f"https://a.b/{part}.tar?sig={part}xyz"]} for part in (1, 2))
    other = {"urls": ["https://a.b/1.tar?sig=other"]}
    assert redacted(one) != redacted(two)
    assert redacted(one) == redacted(other)


def test_log_records_are_redacted_with_their_arguments():
    record = logging.LogRecord("a", logging.INFO, "f", 1, "reading %s", ("https://a:b@c/d",), None)
    assert redact_record(record)
    assert record.getMessage() == f"reading https://{HIDDEN}@c/d"


def test_a_name_from_outside_is_one_line_of_text():
    assert printable("a/ünï 猫.jpg") == "a/ünï 猫.jpg"
    assert printable("a\x1b[2Jb\nc\u202ed") == r"a\x1b[2Jb\nc\u202ed"


COMMANDS = {
    "pipe:cat /data/a/000.tar": "pipe:cat /data/a/000.tar",
    "pipe:mysql -phunter2 -e 'select x' | tar c": f"pipe:mysql {HIDDEN}",
    "pipe:get --strange hunter2 s3://b/{000..005}.tar -": f"pipe:get {HIDDEN} s3://b/{{000..005}}.tar {HIDDEN}",
    "pipe:curl -H 'X: a' 'https://u:p@a.b/000.tar?x=hunter2'": f"pipe:curl {HIDDEN} https://{HIDDEN}@a.b/000.tar",
    "pipe:PIN=hunter2 get a.tar.zst": f"pipe:PIN {HIDDEN} a.tar.zst",
    """data.urls=["pipe:get -phunter2 a.tar","pipe:get 'x y' b.tar",c.tar]""": (
        f'data.urls=["pipe:get {HIDDEN} a.tar pipe:get {HIDDEN} b.tar'
    ),
}


@pytest.mark.parametrize("argument", COMMANDS)
def test_of_a_command_only_the_program_and_its_tars_are_shown(argument: str):
    assert redact_argument(argument) == COMMANDS[argument]
    assert redact_argument(COMMANDS[argument]) == COMMANDS[argument]
    assert redacted({"urls": [argument]}) == {"urls": [COMMANDS[argument]]}


def test_the_current_folder_in_the_environment_is_no_secret(monkeypatch):
    monkeypatch.setenv("PWD", "/home/anna/project")
    assert redact("runs in /home/anna/project") == "runs in /home/anna/project"


PIECES = (
    "hf_a1",
    "://a:",
    "&key",
    "?a-",
    "-api_",
    "--a-",
    " --a",
    "secret: ",
    "password",
    'token":',
    "eyJa1a1a1a1a.",
    "sk-a",
)


@pytest.mark.parametrize("piece", [*PIECES, "pipe:a "])
def test_work_grows_with_the_text_and_not_with_its_square(piece: str):
    assert_linear(redact_argument, lambda length: piece * (length // len(piece)))


def test_what_is_logged_of_a_long_text_is_its_beginning_and_its_end():
    record = logging.LogRecord("a", logging.INFO, "f", 1, "%s of %s", ("x" * 10**6, "the end"), None)
    redact_record(record)
    assert len(record.getMessage()) < LONGEST_LOGGED + 100
    assert record.getMessage().startswith("xxx")
    assert record.getMessage().endswith("x of the end")
    assert shortened("abcdefgh", 4) == "ab[... 4 characters ...]gh"
