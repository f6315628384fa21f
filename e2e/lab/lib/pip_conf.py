"""Write this machine's pip settings as one file, for image builds.

PIP_CONFIG_OUT names the file. Prints the paths the settings refer to, one a line, so that the
caller can mount them at the same place in the build.
"""

import configparser
import os
import subprocess
import sys
from pathlib import Path

# Where packages come from and whom to trust. Other settings of the machine (a cache folder, a
# target) mean nothing in a build.
SOURCES = {
    "cert", "client-cert", "default-timeout", "extra-index-url", "find-links", "index-url", "no-index",
    "proxy", "retries", "timeout", "trusted-host",
}  # fmt: skip


def config_files() -> list[Path]:
    """Return pip's configuration files, those that win last."""
    shown = subprocess.run(
        [sys.executable, "-m", "pip", "config", "debug"], capture_output=True, text=True, check=False
    ).stdout
    # Lines such as "  /etc/pip.conf, exists: True", from the weakest to the strongest.
    return [Path(line.split(", exists: ")[0].strip()) for line in shown.splitlines() if line.endswith("exists: True")]


def machine_settings() -> dict[str, str]:
    """Return the settings in SOURCES from pip's files and, stronger, its environment variables."""
    settings: dict[str, str] = {}
    parser = configparser.RawConfigParser()
    parser.read(config_files())
    for section in ("global", "install"):
        if parser.has_section(section):
            settings.update(parser.items(section))
    for name, value in os.environ.items():
        if name.startswith("PIP_"):
            settings[name.removeprefix("PIP_").lower().replace("_", "-")] = value
    return {name: value for name, value in settings.items() if name in SOURCES}


def main() -> None:
    """Write the file and print the paths."""
    settings = machine_settings()
    parser = configparser.RawConfigParser()
    parser["global"] = settings
    with open(os.environ["PIP_CONFIG_OUT"], "w", encoding="utf-8") as out:
        parser.write(out)
    for value in settings.values():
        for word in value.split():
            # Certificates below /etc/ssl/certs are mounted as a folder anyway.
            if word.startswith("/") and Path(word).exists() and not word.startswith("/etc/ssl/certs/"):
                print(word)


main()
