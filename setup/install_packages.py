"""Fill an environment with packages: by uv, or by pip where uv cannot be had.

make_env.sh, whose -h has the options, runs it with the environment's own Python.
"""

import argparse
import ast
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = Path(sys.prefix)
BUILDS = "https://download.pytorch.org/whl/"
EVERY_S = 10
LIMIT_S, ASK_LIMIT_S = 7200, 60  # for what installs, and for what answers a question
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]

# Beside the environment's packages and not among them: nobody who installs the same needs it.
UV = VENV / "uv/bin/uv"
UV_VERSIONS = "uv>=0.5,<1"
# On the same disk, so that files are linked and not copied, each on the disk once. With the
# cache gone nothing else has a hand in them, and the user's own cache has not grown by 6 GB.
CACHE = VENV / "uv/cache"

# What pip can be configured with, and uv calls otherwise.
VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "constraint": "UV_CONSTRAINT",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}


def main() -> int:
    """Install; 1 if that failed, which is said."""
    parser = argparse.ArgumentParser()
    parser.add_argument("requirements", type=Path, nargs="+")
    parser.add_argument("--pip", action="store_true")
    parser.add_argument("--lock", type=Path)
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--torch")
    options = parser.parse_args()

    log = Log(VENV / "install.log")
    commands = [[*PIP, "install", "--progress-bar", "off", *words] for words in steps(options)]
    environment, instead = dict(os.environ), ""
    if not options.pip:
        if why := get_uv(log, options.wheels):
            print(f"environment: pip installs, half as fast; uv cannot be had: {why}", flush=True)
        else:
            settings = pip_settings()
            commands = [uv_command(words, settings) for words in steps(options)]
            environment = uv_environment(settings, environment)
            instead = "; to have pip install in uv's place: --pip"
    for command in commands:
        if not log.run(command, environment):
            received = f"motley: that failed; all of its output is in {log.path}{instead}"
            print(*log.lines()[-20:], received, sep="\n", file=sys.stderr)
            return 1
    shutil.rmtree(CACHE, ignore_errors=True)
    return 0


class Log:
    """Runs commands with their output in a file, and says every EVERY_S how far they are."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.began = time.monotonic()
        path.write_text("")

    def run(self, command: Sequence[str], environment: Mapping[str, str] = os.environ) -> bool:
        """Whether the command ended well."""
        with (
            self.path.open("a") as file,
            subprocess.Popen(command, stdout=file, stderr=file, env=environment) as job,
        ):
            while True:
                passed = time.monotonic() - self.began
                if passed > LIMIT_S:
                    job.kill()
                    print(f"  {command[0]} did not end within {LIMIT_S / 3600:.0f} h", flush=True)
                    return False
                try:
                    return job.wait(timeout=EVERY_S - passed % EVERY_S) == 0
                except subprocess.TimeoutExpired:
                    received = (self.lines() or [""])[-1].strip()
                    print(
                        f"  {round(time.monotonic() - self.began)} s: {received[:70]}", flush=True
                    )

    def lines(self) -> list[str]:
        """Return the output so far."""
        return self.path.read_text(errors="replace").splitlines()


def get_uv(log: Log, wheels: Path | None) -> str:
    """Have uv at UV; if it cannot be had: why."""
    if not _uv_runs():
        # One that must be compiled, by Rust, would take longer than pip.
        words = ["install", "--only-binary", ":all:", "--no-deps", "--retries", "1", "--upgrade"]
        words += ["--target", str(UV.parents[1]), *_only(wheels), UV_VERSIONS]
        if not log.run([*PIP, *words]):
            return log.lines()[-1]
        if not _uv_runs():
            return f"{UV} does not run"
    return ""


def _uv_runs() -> bool:
    try:
        done = subprocess.run([UV, "--version"], capture_output=True, timeout=ASK_LIMIT_S)
        return done.returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _only(wheels: Path | None) -> list[str]:
    return ["--no-index", "--find-links", str(wheels)] if wheels else []


def steps(options: argparse.Namespace) -> Iterator[list[str]]:
    """Return the words after ``pip install``, one command after another."""
    only, build = _only(options.wheels), BUILDS + (options.torch or "")
    if not options.wheels:
        yield ["--upgrade", "pip", "setuptools", "wheel"]
    if options.lock:
        extra = ["--extra-index-url", build] if options.torch else []
        yield [*only, "-r", str(options.lock), *extra]
    else:
        if options.torch:
            # torchvision comes from where torch does: beside another build it cannot be imported.
            lines = (ROOT / "requirements.txt").read_text().splitlines()
            torch = next(line.split()[0] for line in lines if line.startswith("torch>="))
            yield [*only, "--force-reinstall", "--index-url", build, torch, "torchvision"]
        for file in options.requirements:
            yield [*only, "-r", str(file)]
    yield [*only, "--no-deps", "--no-build-isolation", "-e", str(ROOT)]


def pip_settings() -> dict[str, list[str]]:
    """Return pip's configuration for ``pip install``: the values of each name."""
    asks = [*PIP, "config", "list"]
    try:
        listed = subprocess.run(
            asks, stdout=subprocess.PIPE, text=True, check=True, timeout=ASK_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        sys.exit(
            f"motley: {' '.join(asks)} did not end within {ASK_LIMIT_S} s; see whether the disk of "
            f"{VENV} answers"
        )
    lines = [line.partition("=") for line in listed.stdout.splitlines()]
    return {
        name.removeprefix(section): ast.literal_eval(value).split()
        for section in ("global.", "install.", ":env:.")  # as pip: what comes later wins
        for name, _, value in lines
        if name.startswith(section)
    }


def uv_command(words: Sequence[str], settings: Mapping[str, list[str]]) -> list[str]:
    """Return uv's command that does what ``pip install`` does with these words."""
    # An environment may be others' to read only: none of them could ever write a .pyc.
    command = [str(UV), "pip", "install", "--python", sys.executable, "--compile-bytecode"]
    # To uv a configured index may come before one that its line calls --index-url.
    command += ["--default-index" if word == "--index-url" else word for word in words]
    # Of this uv reads no variable.
    if settings.get("no-index", ["0"])[0].lower() in ("1", "true", "yes", "on", "y", "t"):
        command += ["--no-index"] * ("--no-index" not in command)
    return command


def uv_environment(
    settings: Mapping[str, list[str]], environment: Mapping[str, str]
) -> dict[str, str]:
    """Return an environment with which uv installs from pip's sources; UV_ variables win."""
    # pip takes the newest version of all indexes, uv by itself the first index that has any.
    given = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_NO_CONFIG": "1"}
    for name, variable in VARIABLES.items():
        if values := settings.get(name):
            given[variable] = ("," if name == "find-links" else " ").join(values)
    return {**given, **environment, "UV_CACHE_DIR": str(CACHE)}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
