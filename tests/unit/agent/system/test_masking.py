"""Secrets are masked before they leave the machine, and ordinary text is left as it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.protocol.wire import MAX_OUTPUT_CHARACTERS
from holdfast.supervisor.output_relay import plain
from holdfast.system import masking
from holdfast.system.masking import MASK, is_secret, mask_command, mask_text
from holdfast.telemetry.configuration import flatten

NAMES_OF_SECRETS = [
    "token", "hub.token", "WANDB_API_KEY", "awsSecretKey", "db-password", "auth", "apiKey", "apikey", "APIKEY",
    "OPENAI_APIKEY", "authtoken", "authToken", "secretkey", "privatekey", "accesskey", "PGPASSWORD", "MYSQL_PWD",
    "DB_PASS", "pass", "passwords", "tokens", "api_tokens", "api_keys", "apitoken", "hftoken", "dbpassword",
    "creds", "dsn", "connection_string", "bearer", "cookie", "session_key", "encryption_key", "ssh_key",
    "hmac_key",
    "dbpass", "user_pw", "GITHUB_PAT", "ghtoken", "wandbkey", "kaggle_key", "subscription_key", "conn_string",
    "webhook_url", "jwt", "wandb_key", "secrets.a", "keys.openai", "smtp.pass", "AWS_SESSION_TOKEN",
]  # fmt: skip
OTHER_NAMES = [
    "max_tokens", "num_tokens", "n_tokens", "tokens_per_batch", "tokenizer", "tokenizer.name", "pad_token",
    "pos_token", "token_type_ids", "token_count", "hidden_pass",
    "eos_token_id", "special_tokens", "key", "keys", "sort_key", "monkey", "keyboard", "author", "passes",
    "num_passes", "pass@1", "bypass", "compass", "vocab.size", "token_file", "password_file", "SSH_AUTH_SOCK",
    "PWD", "OLDPWD", "secretary", "authentic", "batch.size", "",
]  # fmt: skip
SECRETS_IN_TEXT = {
    "password=hunter2!x": f"password={MASK}",
    "password=abc12": f"password={MASK}",
    "password=12345678": f"password={MASK}",
    "password='two words'": f"password='{MASK}'",
    '{"api_key": "abcdef123"}': f'{{"api_key": "{MASK}"}}',
    "{'password': 'a b c'}": f"{{'password': '{MASK}'}}",
    "DB_PASS=x1y2z3": f"DB_PASS={MASK}",
    "OPENAI_APIKEY=abcdef": f"OPENAI_APIKEY={MASK}",
    "MYSQL_PWD: abcdef": f"MYSQL_PWD: {MASK}",
    "[('HF_TOKEN', 'abcdefg')]": f"[('HF_TOKEN', '{MASK}')]",
    "['--password', 'abcdefg']": f"['--password', '{MASK}']",
    "postgresql://ada:pa55word@db/x": f"postgresql://ada:{MASK}@db/x",
    "redis://:pa55word@db": f"redis://:{MASK}@db",
    "mysql://u:pa55/word@db:3306/x": f"mysql://u:{MASK}@db:3306/x",
    "mysql://u:pa55@word@db/x": f"mysql://u:{MASK}@db/x",
    "https://0a1b2c3d4e5f6789@o1.ingest.sentry.io/1": f"https://{MASK}@o1.ingest.sentry.io/1",
    "Authorization: Bearer abcdefgh.ijk": f"Authorization: Bearer {MASK}",
    "Authorization: token abcdefgh": f"Authorization: token {MASK}",
    "'Authorization': 'Basic YWRhOnBhNTU='": f"'Authorization': 'Basic {MASK}'",
    "X-Api-Key: abcdefgh": f"X-Api-Key: {MASK}",
    "Cookie: session=abc; id=9": f"Cookie: {MASK}",
    "key sk-abcdefghijklmnop used": f"key {MASK} used",
    "AIzaSyA0123456789abcdefghijklmnopqrstuv": MASK,
    "ASIAABCDEFGHIJKLMNOP": MASK,
    "npm_abcdefghij0123456789": MASK,
    "hfl_abababababababababababababababababab": MASK,
    "hf_0123456789_abababababababababab": MASK,
    "https://hooks.slack.com/services/T0/B0/abcdefghijkl": f"https://hooks.slack.com/{MASK}",
    "AccountKey=abcdefgh0123==": f"AccountKey={MASK}",
    "?sig=abcdefgh0123%3D&se=2026": f"?sig={MASK}&se=2026",
    "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7abcdefghijkl": MASK,
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nvQIB\n-----END RSA PRIVATE KEY-----": MASK,
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.abcdefgh": MASK,
    "-----BEGIN PGP PRIVATE KEY BLOCK-----\nMIIE": MASK,
    "db.pass=abc123x": f"db.pass={MASK}",
    "jwt=abc123xyz, auth: abc123xyz": f"jwt={MASK}, auth: {MASK}",
    "passwords=['abc', 'def']": f"passwords=[{MASK}]",
    "api_keys: ('abcdefg',)": f"api_keys: [{MASK})",
    "{'cookies': {'sid': 'abcdef'}}": f"{{'cookies': [{MASK}}}}}",
    "password=b'abcdefg'": f"password=b'{MASK}'",
    "token=SecretStr('abcdefg')": f"token={MASK}'{MASK}')",
    'password\\": \\"abcdefg1\\"': f'password\\": \\"{MASK}"',
    "os.environ['HF_TOKEN'] = 'abcdefg'": f"os.environ['HF_TOKEN'] = '{MASK}'",
    "password => abcdefg": f"password => {MASK}",
    "IDENTIFIED BY 'abcdefg'": f"IDENTIFIED BY '{MASK}'",
    "machine h login ada password abcdefg": f"machine h login ada password {MASK}",
    "sshpass -p abcdefg ssh h": f"sshpass -p {MASK} ssh h",
    "curl -u ada:abcdefg https://h": f"curl -u ada:{MASK} https://h",
    'Authorization: Digest username="a", response="b"': f"Authorization: Digest {MASK}",
    "Subscription-Key: abcdefg": f"Subscription-Key: {MASK}",
    "Incorrect API key provided: abcdefg.": f"Incorrect API key provided: {MASK}",
    "https://api.telegram.org/bot123456789:abcdefghijklmnopqrstuvw/x": f"https://api.telegram.org/bot123456789:{MASK}/x",
    "gsk_abcdefghij0123456789": MASK,
    "dckr_pat_abcdefghij0123456789": MASK,
    "hvs.abcdefghij0123456789": MASK,
    "train.py --hub-token abcdefgh --lr 1": f"train.py --hub-token {MASK} --lr 1",
    "train.py --wandb.key=abcdefg1 --lr=0.000125": f"train.py --wandb.key={MASK} --lr=0.000125",
}
ORDINARY_TEXT = [
    "loss 0.31, seconds per token: 0.004213",
    "token: 12345.6",
    "max_tokens=2048000",
    "see https://a.b/c:d@e",
    "http://localhost:8080/a@b",
    "git clone ssh://git@github.com/x/y",
    "password: None",
    "password=***",
    "commit 0123456789abcdef0123456789abcdef01234567",
    "sha256 0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
    "hf_hub_download of hf_model",
    "basic block, bearer of news",
    "cookie: chocolate",
    "'pad_token': '<|endoftext|>', cls_token: zeros-like",
    "basic training loop, bearer authentication",
    "docker run --user 1000:1000 image",
    "xai-explanations-of-a-notebook",
    "auth: required, token_type_ids: 0101010",
    "passes=3, compass=west, monkey=1",
]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    masking._secrets_of_environment.cache_clear()
    yield monkeypatch
    masking._secrets_of_environment.cache_clear()


@pytest.mark.parametrize("name", NAMES_OF_SECRETS)
def test_names_of_secrets_are_recognized(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_other_names_are_not(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(("text", "masked"), SECRETS_IN_TEXT.items())
def test_secrets_in_text_are_masked(text: str, masked: str) -> None:
    assert mask_text(text) == masked
    assert mask_text(masked) == masked


@pytest.mark.parametrize("text", ORDINARY_TEXT)
def test_ordinary_text_is_left(text: str) -> None:
    assert mask_text(text) == text


def test_the_value_of_a_secret_variable_is_masked_wherever_it_occurs(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("HF_TOKEN", "a-long-secret")
    environment.setenv("AWS_SECRET_ACCESS_KEY", "with/slash+plus")
    environment.setenv("SIGNING_KEY", "first line\nsecond line")
    environment.setenv("API_TOKEN", "/looks/like/a/path")
    environment.setenv("PGPASSWORD", "postgres-secret")
    environment.setenv("PWD", "in-this-folder")
    environment.setenv("SSH_AUTH_SOCK", "/run/agent")
    environment.setenv("GOOGLE_CREDENTIALS", "/etc/hostname")
    assert mask_text("logged in with a-long-secret.") == f"logged in with {MASK}."
    assert mask_text("with/slash+plus with%2Fslash%2Bplus") == f"{MASK} {MASK}"
    assert mask_text("first line") == mask_text("second line") == MASK
    assert mask_text("postgres-secret /looks/like/a/path") == f"{MASK} {MASK}"
    assert mask_text("in-this-folder /run/agent /etc/hostname") == "in-this-folder /run/agent /etc/hostname"


def test_the_password_in_a_url_of_a_variable_is_masked_wherever_it_occurs(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("DATABASE_URL", "postgresql://ada:s3cr3t%2Fpw@db/jobs")
    environment.setenv("CACHE", "redis://:postgres@cache:6379/0")
    assert mask_text("user ada, password s3cr3t/pw or s3cr3t%2Fpw") == f"user ada, password {MASK} or {MASK}"
    assert mask_text("postgres is ready") == "postgres is ready"


@pytest.mark.parametrize(
    "before", [MAX_OUTPUT_CHARACTERS - 6, MAX_OUTPUT_CHARACTERS - 1, 4 * MAX_OUTPUT_CHARACTERS]
)
def test_a_secret_is_masked_before_a_line_is_cut(environment: pytest.MonkeyPatch, before: int) -> None:
    environment.setenv("HF_TOKEN", "a-long-secret")
    shown = plain(b"x" * before + b"a-long-secret and more")
    assert "a-l" not in shown
    assert len(shown) <= MAX_OUTPUT_CHARACTERS


@pytest.mark.parametrize("within", ["\x1b[0m", "\0", "\x9b0m", "\u200b", "\u202e"])
def test_characters_without_width_hide_no_secret(environment: pytest.MonkeyPatch, within: str) -> None:
    environment.setenv("HF_TOKEN", "a-long-secret")
    assert plain(f"a-long{within}-secret".encode()) == MASK


def test_a_number_is_a_count_under_a_name_that_can_mean_one() -> None:
    assert flatten({"tokens": 2_000_000, "password": 12345678}) == {"tokens": "2000000", "password": MASK}
    assert flatten({"tokens": "abcdefgh"}) == {"tokens": MASK}


def test_a_command_is_masked_by_the_names_of_its_options() -> None:
    words = ["python", "train.py", "--token", "x1", "--api-key=y2", "--name", "a b", "--use-auth", "--lr", "3"]
    assert (
        mask_command(words) == f"python train.py --token {MASK} '--api-key={MASK}' --name 'a b' --use-auth --lr 3"
    )


@pytest.mark.parametrize(
    "words",
    [["--apikey", "s3cret"], ["--apikey=s3cret"], ["--password", "-s3cret"], ["--opts", "a.apikey=s3cret"],
     ["--cfg={'token': 's3cret'}"], ["--wandb_key", "s3cret"], ["HF_TOKEN=s3cret"],
     ["--api-keys", "s3cret", "s3cret2"]],
)  # fmt: skip
def test_secrets_of_a_command_are_masked(words: list[str]) -> None:
    assert "s3cret" not in mask_command(words)
