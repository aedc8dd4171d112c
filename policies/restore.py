"""Writing an earlier policy back to its file: as it was, with a line that says who went back and why, and at once."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from policies.compose import compose
from policies.errors import PolicyError
from policies.load import parse_policy, validate
from policies.read import dump_yaml, read_text, read_yaml

_NOTE = "# Rolled back to "


def restored_text(text: str, path: str | Path, note: str) -> str:
    """What must stand in the file at ``path`` so that the policy in force becomes that of ``text``, under a ``note``.

    ``text`` is a whole policy, as history keeps it. Where the file's directory has defaults by now, the result says
    that it is complete by itself. Raises PolicyError where the text is no policy any more.
    """
    wanted = parse_policy(text, str(path))
    lines = text.splitlines(keepends=True)
    while lines and lines[0].startswith(_NOTE):
        del lines[0]
    head = _NOTE + " ".join(note.split()) + "\n"
    plain = head + "".join(lines)

    def read(name: str) -> str:
        return plain if name == str(path) else read_text(name)

    try:
        if validate(compose(str(path), read)).policy == wanted:
            return plain
    except PolicyError:
        pass  # what lies below it by now does not fit
    data, _ = read_yaml(text, str(path))
    return head + dump_yaml({"extends": []} | data)


def write_policy(path: str | Path, text: str) -> None:
    """Put ``text`` into the file at ``path`` in one step, keeping its mode. Raises OSError or PolicyError.

    A file that is mounted from a ConfigMap is refused, since it belongs to the cluster.
    """
    path = Path(path)
    if path.is_symlink() and path.readlink().parts[:1] == ("..data",):
        raise PolicyError("is mounted from a ConfigMap; apply the text there (--print shows it)", path=str(path))
    target = path.resolve()
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o644
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(mode)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
