"""The configuration file: sample, faults, reload."""

from __future__ import annotations

import contextlib
import tomllib
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mirrord import config, units
from mirrord.errors import InvalidConfigError
from mirrord.model import Policy, SteeringKind

SAMPLE = Path(__file__).parents[2] / "config.toml"


def faults_of(tmp_path: Path, text: str | bytes) -> list[dict[str, object]]:
    path = tmp_path / "config.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InvalidConfigError) as caught:
        config.load(path)
    assert caught.value.exit_status == 2
    assert all(fault["message"] in caught.value.message for fault in caught.value.facts["faults"])
    return list(caught.value.facts["faults"])


def test_sample_names_every_key_with_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commented sample has all settings, with root's defaults."""
    monkeypatch.setattr("os.geteuid", lambda: 0)
    written = tomllib.loads(SAMPLE.read_text())
    keys = {
        f"{k}.{n}" if isinstance(v, dict) else k
        for k, v in written.items()
        for n in (v if isinstance(v, dict) else [k])
    }
    assert keys == {key for key, _ in config.setting_keys()} - {
        "mirror",
        "credential",
        "grading.rule",
    }
    assert config.load(SAMPLE) == config.Settings()


def test_sample_marks_what_needs_a_restart() -> None:
    """The sample's remarks and the table agree."""
    marked = [
        line.split("=")[0].strip()
        for line in SAMPLE.read_text().splitlines()
        if line.rstrip().endswith("(restart)")
    ]
    assert marked == [key.rpartition(".")[2] for key, restart in config.setting_keys() if restart]


def test_a_mirror_that_is_there_twice_is_named_by_the_second_line(tmp_path: Path) -> None:
    """The first one is right."""
    path = tmp_path / "config.toml"
    path.write_text(
        '[[mirror]]\nrepo = "a/b"\n\n[[mirror]]\nrepo = "c/d"\n\n[[mirror]]\nrepo = "C/D"\n'
    )
    with pytest.raises(InvalidConfigError) as caught:
        config.load(path)
    assert [(fault["key"], fault["line"]) for fault in caught.value.facts["faults"]] == [
        ("mirror[2].repo", 8)
    ]


def test_all_faults_are_listed_at_once_with_key_line_and_suggestion(tmp_path: Path) -> None:
    """One run of the daemon shows all faults."""
    text = (
        'state_dir = "here"\nsokcet = "/s"\n[sync]\nintervall = "6h"\nconcurrency = 0\n'
        '[audit]\nlevel = "deep"\n[checkouts]\nttl = "5 minutes"\ntemplate_bytes = "lots"\n'
        '[[mirror]]\nrepo = "a/b"\n[[mirror]]\nrepo = "../etc"\n'
    )
    faults = {str(f["key"]): f for f in faults_of(tmp_path, text)}
    lines = {key: fault["line"] for key, fault in faults.items()}
    assert lines == {
        "state_dir": 1,
        "sokcet": 2,
        "sync.intervall": 4,
        "sync.concurrency": 5,
        "audit.level": 7,
        "checkouts.ttl": 9,
        "checkouts.template_bytes": 10,
        "mirror[1].repo": 14,
    }
    assert "did you mean sync.interval?" in str(faults["sync.intervall"]["message"])
    assert "did you mean socket?" in str(faults["sokcet"]["message"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[checkouts]\nmax = true", "must be a whole number"),
        ("[checkouts]\nmax = 3.0", "must be a whole number"),
        ('[sync]\nconcurrency = "4"', "must be a whole number"),
        ("[checkouts]\nprewarm = 1", "must be true or false"),
        ('[audit]\nheal = "yes"', "must be true or false"),
        ('[datasets]\nwatch = "no"', "must be true or false"),
        ("[sync]\ninterval = false", "'False' is not a duration"),
        ("[sync]\ninterval = 0.0", "'0.0' is not a duration"),
        ("[checkouts]\ntemplate_bytes = true", "'True' is not a size"),
        ("[access]\nadmins = [true]", "neither the name of a user nor a uid"),
        ("[access]\nadmins = [-1]", "neither the name of a user nor a uid"),
        ('[access]\nadmins = [""]', "neither the name of a user nor a uid"),
        ('[access]\nadmins = [1, "x"]', "a uid may be written as a string"),
        ('[access]\ncommits = "all"', "must be 'recorded' or 'any'"),
        ('[access]\nowners = "subuids"', "did you mean subuid?"),
        ("[access]\nmax_per_user = 0", "must be greater than or equal to 1"),
        ('[access]\nttl_max = "0"', "must be greater than zero"),
        ("[log]\nlevel = 5", "must be 'debug', 'info', 'warning' or 'error'"),
        ('[log]\nlevel = "INFO"', "did you mean info?"),
        ('[audit]\nlevel = "closur"', "did you mean closure?"),
        ("state_dir = 5", "must be a string"),
        ("sync = 5", "must be a table"),
        ("[upstream]\nrefs = []", "must not be empty"),
        ('[grading]\npolicy = "never"', "must be 'report', 'drop' or 'refuse'"),
        ('[grading.policies]\nruner = "drop"', "did you mean runner?"),
        ('[grading.policies]\ntests = "dorp"', "did you mean drop?"),
        ('[[grading.rule]]\nname = "a b"\npaths = ["x"]', "is not a name of lower-case letters"),
        ('[[grading.rule]]\nname = "a"\npaths = ["/"]', "is not a pattern of paths"),
        ('[[grading.rule]]\nname = "a"\npaths = []', "must not be empty"),
        (
            '[[grading.rule]]\nname = "a"\npath = ["x"]\npaths = ["x"]',
            "did you mean grading.rule.paths?",
        ),
        ('[mirror]\nrepo = "a/b"', "must be an array"),
        ("[[mirror]]\nrepo = 5", "must be a string"),
        ('[[mirror]]\nrepo = "a/b"\n[[mirror]]\nrepo = "A/b"', "A/b occurs twice"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_in_the_words_of_toml(
    tmp_path: Path, text: str, said: str
) -> None:
    """Types are not converted: 1 is not true, and true is not 1."""
    (fault,) = faults_of(tmp_path, text)
    assert said in str(fault["message"])


def test_rules_and_policies_of_grading(tmp_path: Path) -> None:
    """A fault in the second rule has its own line. Rules can be reloaded."""
    rule = '[[grading.rule]]\nname = "a"\npaths = ["x/**"]\n'
    (fault,) = faults_of(tmp_path, rule + '[[grading.rule]]\nname = "b"\npaths = ["\\u0000"]\n')
    assert (fault["key"], fault["line"]) == ("grading.rule[1].paths[0]", 6)
    path = tmp_path / "config.toml"
    path.write_text(rule + 'policy = "drop"\n[grading.policies]\ntests = "refuse"\n')
    new = config.load(path)
    assert new.grading.policies == {SteeringKind.TESTS: Policy.REFUSE}
    assert [(own.name, own.paths, own.policy) for own in new.grading.rule] == [
        ("a", ("x/**",), Policy.DROP)
    ]
    changed = ["grading.policies", "grading.rule"]
    old = config.Settings(state_dir=new.state_dir, socket=new.socket)
    assert config.compare(old, new) == (changed, [])


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ('url = "https://me:s3cret@host/"\nproxy = "http://p"', "credential[1].url"),
        ('url = "https://h/"', "nothing but a URL"),
        ('url = "https://h/"\npassword_file = "/a"\nbearer_file = "/b"', "may have one"),
        ('url = "https://h/"\nbearer_file = "/b"\nusername = "x"', "does not use"),
        ('url = "https://h/"\nclient_key = "/b"', "client_key without client_cert"),
        ('url = "https://h/"\nssh_key = "/b"', "has ssh_key, which a URL of HTTP lacks"),
        ('url = "git@h:x"\npassword_file = "/b"', "password_file, which a URL of ssh lacks"),
        ('url = "git@h:x"\nssh_key = "/b"\naccept_new = true', "accept_new without known_hosts"),
        ('url = "https://h/"\npassword_file = "token"', "not an absolute path"),
        ('url = "https://h/"\npasword_file = "/token"', "did you mean credential.password_file?"),
        ('url = "https://h/"\ncommand = []', "must not be empty"),
        ('url = "https://h/"\ngithub_app = {id = 1, key_file = "/k"}', "one of installation and"),
        ('url = "https://ok"\nproxy = "http://p"', "occurs twice"),
    ],
)
def test_a_credential_that_makes_no_sense_is_refused(
    tmp_path: Path, lines: str, fault: str
) -> None:
    """With the line of its table, and without a secret."""
    path = tmp_path / "config.toml"
    good = '[[credential]]\nurl = "https://ok/"\nproxy = "http://me:s3cret@proxy:1"\n'
    path.write_text(f"{good}[[credential]]\n{lines}\n")
    with pytest.raises(InvalidConfigError) as caught:
        config.load(path)
    assert fault in caught.value.message
    assert "s3cret" not in caught.value.message
    (told,) = caught.value.facts["faults"]
    assert told["line"] in range(4, 8)


def test_faults_are_listed_in_the_order_of_the_file(tmp_path: Path) -> None:
    """Faults are sorted by line."""
    faults = faults_of(tmp_path, '[log]\nlevel = "x"\n[sync]\njitter = "y"\n[audit]\nz = 1\n')
    assert [fault["line"] for fault in faults] == [2, 4, 6]


@pytest.mark.parametrize(
    "text",
    [
        "[sync",
        "a = ",
        'x = "unterminated',
        "= 3",
        "[a]\n[a]",
        "a = 1\na = 2",
        b"\xff\xfe",
        "state_dir = [1, 'a']",
        "[[",
        '"',
        "a.b.c",
        "\x00",
    ],
)
def test_malformed_files_are_refused_not_crashed_on(tmp_path: Path, text: str | bytes) -> None:
    """Any failure of the toml package is an InvalidConfigError."""
    assert faults_of(tmp_path, text)


@given(text=st.text(alphabet="[]=\"'\n.,{}#ab1\\ \t", max_size=60))
def test_no_text_escapes_as_another_error(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """toml 0.10.2 raises half a dozen classes on invalid input."""
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(text)
    try:
        config.load(path)
    except InvalidConfigError as error:
        assert error.facts["faults"]


@pytest.mark.parametrize(
    "url",
    ["https://h/{owner}/x.git", "https://h/{repo}/{name}", "https://h/{owner.__class__}/{name}"],
)
def test_upstream_template_knows_owner_and_name_only(tmp_path: Path, url: str) -> None:
    """A template cannot reach into Python's format language."""
    assert faults_of(tmp_path, f'[upstream]\nurl = "{url}"')[0]["key"] == "upstream.url"


@pytest.mark.parametrize(
    "ref",
    [
        "heads/*",
        "refs/mirrord/*",
        "refs/replace/*",
        "refs/*/*",
        "refs/heads/a b",
        "refs/heads/..",
        "+refs/heads/*:x",
    ],
)
def test_ref_patterns_that_could_reach_our_names_are_refused(tmp_path: Path, ref: str) -> None:
    """refs/mirrord cannot be configured."""
    assert faults_of(tmp_path, f'[upstream]\nrefs = ["{ref}"]')


def test_durations_need_a_unit(tmp_path: Path) -> None:
    """A bare number could be seconds or minutes."""
    assert faults_of(tmp_path, '[sync]\ninterval = 90\n[audit]\ninterval = "10"')
    assert units.parse_duration("1h30m") == timedelta(minutes=90)


@given(st.integers(0, 10**9).map(lambda ms: timedelta(milliseconds=ms)))
def test_durations_are_written_as_they_are_read(value: timedelta) -> None:
    """`config show` prints what a file may hold."""
    assert units.parse_duration(units.format_duration(value)) == value


@given(st.integers(0, 2**50))
def test_sizes_are_written_as_they_are_read(value: int) -> None:
    """`config show` prints what a file may hold."""
    assert units.parse_size(units.format_size(value)) == value


NEEDS_RESTART = {"state_dir": "/elsewhere", "socket": "/other.sock"}
NEEDS_RESTART["store.url"] = "s3://bucket/prefix"
NEEDS_RESTART["catalog.url"] = "postgresql+psycopg://mirrord@db/mirrord"
NEEDS_RESTART["service.namespace"] = "never"
LIVE = {
    "upstream.url": "https://example.com/{name}",
    "upstream.fallbacks": ["https://example.com/{name}"],
    "upstream.refs": ["refs/heads/*"],
    "upstream.timeout": "1m",
    "sync.interval": "1h",
    "sync.jitter": "1m",
    "sync.concurrency": 2,
    "audit.interval": "1h",
    "audit.level": "quick",
    "audit.content_interval": "1h",
    "audit.heal": False,
    "audit.accept": ["missing"],
    "maintenance.interval": "1h",
    "checkouts.backend": "pool",
    "checkouts.objects": "private",
    "checkouts.history": "squashed",
    "checkouts.ttl": "1h",
    "checkouts.max": 3,
    "checkouts.prewarm": False,
    "checkouts.template_bytes": "1GiB",
    "checkouts.template_ttl": "1d",
    "checkouts.disk_reserve": 0,
    "checkouts.copy_files": 3,
    "checkouts.copy_bytes": "1GiB",
    "checkouts.copy_timeout": "1h",
    "checkouts.diff_timeout": "1h",
    "datasets.watch": False,
    "datasets.submodules": False,
    "datasets.lfs": True,
    "access.group": "other",
    "access.admins": ["someone"],
    "access.commits": "any",
    "access.owners": "none",
    "access.max_per_user": 3,
    "access.requests_per_user": 3,
    "access.bytes_per_user": 0,
    "access.rate_per_user": 0,
    "access.ttl_max": "1h",
    "environments.auth_file": "/etc/mirrord/auth.json",
    "environments.image_bytes": 1024**3,
    "environments.leaks": "hide",
    "environments.index": "/srv/packages",
    "environments.network": False,
    "grading.policy": "drop",
    "grading.policies": {"tests": "drop"},
    "grading.file_bytes": "2MiB",
    "grading.rule": [{"name": "own", "paths": ["x"]}],
    "log.level": "debug",
    "log.format": "json",
    "web.listen": "[::1]:8780",
    "web.hosts": ["ci.example.com"],
    "docker.volumes": True,
    "mirror": [{"repo": "psf/requests"}],
    "credential": [{"url": "https://git.example.com/", "password_file": "/x"}],
}


@pytest.mark.parametrize(
    ("key", "value", "is_live"),
    [
        *((key, value, False) for key, value in NEEDS_RESTART.items()),
        *((key, value, True) for key, value in LIVE.items()),
    ],
    ids=[*NEEDS_RESTART, *LIVE],
)
def test_a_reload_applies_a_key_or_names_it(key: str, value: object, is_live: bool) -> None:
    """A refused key keeps its old value."""
    section, _, name = key.rpartition(".")
    values = {name: value}
    fixed = {"socket": "/run/mirrord.sock"}  # else below the state directory, for some users
    old, new = (
        config.Settings.model_validate(fixed | ({section: each} if section else each))
        for each in ({}, values)
    )
    assert config.compare(old, new) == (([key], []) if is_live else ([], [key]))
    assert config.merge_live(old, new) == (new if is_live else old)


def test_each_key_is_said_to_be_live_or_not() -> None:
    """Settings that need a restart are listed here, so a new key needs a decision."""
    assert dict(config.setting_keys()) == dict.fromkeys(LIVE, False) | dict.fromkeys(
        NEEDS_RESTART, True
    )


def test_an_unreadable_file_is_a_fault_not_a_default(tmp_path: Path) -> None:
    """A daemon with another configuration than the operator's would be a surprise."""
    with pytest.raises(InvalidConfigError, match="not readable"):
        config.load(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    "url",
    [
        "ext::sh -c id",
        "--upload-pack=x",
        "ftp://h/{name}",
        "relative/{name}",
        "",
        "https://h/{name} x",
    ],
)
def test_what_is_no_upstream_is_refused_without_being_shown(tmp_path: Path, url: str) -> None:
    """Every setting with a URL: it might contain a password."""
    mirror = f"[[mirror]]\nrepo = 'a/b'\nurl = {url!r}\n"
    text = f"[upstream]\nurl = {url!r}\nfallbacks = [{url!r}]\n{mirror}"
    faults = faults_of(tmp_path, text)
    assert {fault["key"] for fault in faults} == {
        "upstream.url",
        "upstream.fallbacks[0]",
        "mirror[0].url",
    }
    assert not url or not any(url in str(fault["message"]) for fault in faults)


@pytest.mark.parametrize(
    "url",
    [
        "https://u:p@h/{owner}/{name}.git",
        "git@h:{owner}/{name}",
        "/srv/{name}",
        "FILE:///srv/{name}",
    ],
)
def test_every_kind_of_upstream_is_taken(tmp_path: Path, url: str) -> None:
    """URLs, paths, and the scp-like spelling."""
    (tmp_path / "config.toml").write_text(
        f"[upstream]\nurl = {url!r}\n[[mirror]]\nrepo = 'a/b'\nurl = {url!r}\n"
    )
    assert config.load(tmp_path / "config.toml").upstream.url == url


def test_a_fault_of_toml_shows_no_url(tmp_path: Path) -> None:
    """Toml 0.10.2 prints the table that was written twice."""
    (fault,) = faults_of(
        tmp_path, "[upstream]\nurl = 'https://u:sesame@h/{name}'\n[upstream]\ntimeout = '1m'\n"
    )
    assert (fault["message"], fault["line"]) == (
        "not TOML: Cannot declare ('upstream',) twice",
        3,
    )
    assert "sesame" not in str(fault["message"])


def test_a_fault_is_told_once(tmp_path: Path) -> None:
    """A list with one faulty item is not also reported as too short; a section is not suggested for its key."""
    (first, second) = faults_of(tmp_path, "[upstream]\nrefs = ['refs/mirrord/*']\n[sync]\nx = 1\n")
    assert first["key"] == "upstream.refs[0]"
    assert second["message"] == "unknown key"


NO_TOML = [
    '[checkouts]\nttl = "\\UFFFFFFFF"',
    "x = " + "[" * 3000,
    "x = {a = {b",
    'x = "\\',
    ".=1",
    "[a]\n[a.b]\n[[a]]\n",
    '"a"."b"=1',
    "[upstream]\nfallbacks = ['https://h/{name}'",
]


@pytest.mark.parametrize("text", NO_TOML, ids=lambda text: text[:24])
def test_whatever_toml_raises_is_one_fault(tmp_path: Path, text: str) -> None:
    """Version 0.10.2 has an OverflowError, a RecursionError and more for what is no TOML."""
    assert faults_of(tmp_path, text)


def test_a_file_that_ends_too_early_is_refused_at_its_last_line(tmp_path: Path) -> None:
    (fault,) = faults_of(tmp_path, "[upstream]\nfallbacks = [\n")
    assert (fault["message"], fault["line"]) == ("not TOML: Invalid value", 2)


def test_a_byte_order_mark_is_no_part_of_a_key(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("\ufeffsocket = '/run/m.sock'\n")
    assert config.load(tmp_path / "config.toml").socket == Path("/run/m.sock")


@given(st.text(alphabet="[]{}=\"'\\.#,\n aUu0-9_:x", max_size=60))
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_text_gets_past_the_faults(tmp_path: Path, text: str) -> None:
    """Settings or faults, nothing else."""
    (tmp_path / "config.toml").write_text(text)
    with contextlib.suppress(InvalidConfigError):
        config.load(tmp_path / "config.toml")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("# " + "x\n# " * 60_000, "longer than 128 KiB"),
        ("\nx = " + "=" * 60_000, "longer than 4096 characters"),
    ],
    ids=["file", "line"],
)
def test_what_would_take_minutes_is_refused_by_size(tmp_path: Path, text: str, told: str) -> None:
    """Before it is parsed: 64 KiB of equals signs are 52 s of toml."""
    (fault,) = faults_of(tmp_path, text)
    assert fault["message"] == told


def test_a_large_configuration_is_read(tmp_path: Path) -> None:
    """A thousand mirrors with their URLs."""
    text = "".join(
        f"[[mirror]]\nrepo = 'owner/name{n}'\nurl = 'https://git.example.com/owner/name{n}.git'\n"
        for n in range(1000)
    )
    (tmp_path / "config.toml").write_text(text)
    assert len(config.load(tmp_path / "config.toml").mirror) == 1000


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('state_dir = "/a\\u0000b"', "state_dir"),
        ('[access]\ngroup = "a\\u0000b"', "access.group"),
        ('[access]\nadmins = ["a\\u0000b"]', "access.admins[0]"),
        ("[access]\nadmins = [4294967296]", "access.admins[0]"),
        (f'[checkouts]\ntemplate_bytes = "{"9" * 400}GB"', "checkouts.template_bytes"),
        ("[checkouts]\ntemplate_bytes = 9223372036854775808", "checkouts.template_bytes"),
    ],
    ids=lambda value: value[:40],
)
def test_values_that_no_system_call_takes_are_faults(tmp_path: Path, line: str, key: str) -> None:
    """They are faults, not crashes at first use."""
    assert [fault["key"] for fault in faults_of(tmp_path, line)] == [key]
