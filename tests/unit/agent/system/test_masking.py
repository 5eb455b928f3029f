"""Secrets are masked before they leave the machine, and ordinary text is left as it is."""

from __future__ import annotations

import pytest

from holdfast.system import masking
from holdfast.system.masking import MASK, is_secret, mask_command, mask_text


@pytest.mark.parametrize(
    "name", ["token", "hub.token", "WANDB_API_KEY", "awsSecretKey", "db-password", "auth", "apiKey"]
)
def test_names_of_secrets_are_recognized(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name", ["max_tokens", "tokenizer", "key", "keys", "monkey", "author", "passes", "vocab.size"]
)
def test_other_names_are_not(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("password=hunter2!x", f"password={MASK}"),
        ('{"api_key": "abcdef123"}', f'{{"api_key": "{MASK}"}}'),
        ("postgresql://ada:pa55word@db/x", f"postgresql://ada:{MASK}@db/x"),
        ("Authorization: Bearer abcdefgh.ijk", f"Authorization: Bearer {MASK}"),
        ("key sk-abcdefghijklmnop used", f"key {MASK} used"),
        ("train.py --hub-token abcdefgh --lr 1", f"train.py --hub-token {MASK} --lr 1"),
    ],
)
def test_secrets_in_text_are_masked(text: str, masked: str) -> None:
    assert mask_text(text) == masked


@pytest.mark.parametrize(
    "text",
    ["loss 0.31, seconds per token: 0.004213", "token: 12345.6", "max_tokens=2048000", "see https://a.b/c:d@e"],
)
def test_ordinary_text_is_left(text: str) -> None:
    assert mask_text(text) == text


def test_the_value_of_a_secret_variable_is_masked_wherever_it_occurs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-long-secret")
    monkeypatch.setenv("PWD", "in-this-folder")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent")
    masking._secrets_of_environment.cache_clear()
    try:
        assert mask_text("logged in with a-long-secret.") == f"logged in with {MASK}."
        assert mask_text("in-this-folder /run/agent") == "in-this-folder /run/agent"
    finally:
        masking._secrets_of_environment.cache_clear()


def test_a_command_is_masked_by_the_names_of_its_options() -> None:
    words = ["python", "train.py", "--token", "x1", "--api-key=y2", "--name", "a b", "--use-auth", "--lr", "3"]
    assert (
        mask_command(words) == f"python train.py --token {MASK} '--api-key={MASK}' --name 'a b' --use-auth --lr 3"
    )
