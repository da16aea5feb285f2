"""Secrets are hidden wherever they stand, and nothing else is."""

import logging
import time

import pytest
import yaml

from cascade_train.config.groups import conf_dir
from cascade_train.redaction import HIDDEN, RedactingFilter, printable, redact, redacted

HUB = "hf_" + "aB3dE5gH7jK9mN1pQ2rS4tU6vW8xY0zA1b"
WANDB = "0123456789abcdef" * 2 + "01234567"
TEXTS = {
    f"weights from {HUB} here": HUB,
    "pipe:curl -H 'Authorization: Bearer abc123def456ghi7' https://a.b/c.tar": "abc123def456ghi7",
    'pipe:curl --header "authorization: token0815" https://a.b/c.tar': "token0815",
    "pipe:curl -u anna:hunter2 https://a.b/c.tar": "hunter2",
    "pipe:curl --user=anna:hunter2 https://a.b/c.tar": "hunter2",
    "data.urls=https://anna:hunt@er2@a.b/c.tar": "hunt@er2",
    "https://a.b/c.tar?X-Amz-Date=20260101&X-Amz-Signature=0815abcd&part=3": "0815abcd",
    "https://a.b/c.tar?x=1&sig=abc%2Fdef%3D": "abc%2Fdef",
    "pipe:AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG/bPxRfiCYEX aws s3 cp s3://a/b -": "wJalrXUtnFEMI",
    "AKIAIOSFODNN7EXAMPLE": "AKIAIOSFODNN7EXAMPLE",
    "task.api_token=abcdef0123456789": "abcdef0123456789",
    "pipe:get --password hunter2 --out -": "hunter2",
    "pipe:get --api-token abcdef0123456789": "abcdef0123456789",
    '{"db_password": "hunter2"}': "hunter2",
    f"pipe:wandb login --relogin {WANDB} && cat a.tar": WANDB,
    f"+task.wandb_api_key={WANDB}": WANDB,
    "a eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl b": "eyJzdWIiOiIxIn0",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----": "MIIE",
    "ghp_" + "a1B2" * 9: "a1B2a1B2",
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
    assert redact("pipe:curl -u a:b https://a.b/c.tar") == f"pipe:curl -u {HIDDEN} https://a.b/c.tar"


def test_values_are_hidden_by_their_names():
    node = {
        "db": {"password": "short", "user": "anna", "pin_secret": 4711, "enabled": True},
        "token": WANDB,
        "secrets": ["one", "two"],
        "pad_token": "<pad>",
        "key": "caption",
        "steps": 3,
        "urls": ["https://a:b@c/d", None],
    }
    assert redacted(node) == {
        "db": {"password": HIDDEN, "user": "anna", "pin_secret": HIDDEN, "enabled": True},
        "token": HIDDEN,
        "secrets": [HIDDEN, HIDDEN],
        "pad_token": "<pad>",
        "key": "caption",
        "steps": 3,
        "urls": [f"https://{HIDDEN}@c/d", None],
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
    assert RedactingFilter().filter(record)
    assert record.getMessage() == f"reading https://{HIDDEN}@c/d"


def test_a_name_from_outside_is_one_line_of_text():
    assert printable("a/ünï 猫.jpg") == "a/ünï 猫.jpg"
    assert printable("a\x1b[2Jb\nc\u202ed") == r"a\x1b[2Jb\nc\u202ed"


@pytest.mark.parametrize(
    "piece", ["a-", "a.", "token=", "sk-", "https://", "--token ", "-----BEGIN PRIVATE KEY-----", "eyJ"]
)
def test_a_long_text_from_outside_costs_no_more_than_its_length(piece: str):
    began = time.process_time()
    redact(piece * (50_000 // len(piece)))
    assert time.process_time() - began < 2.0
