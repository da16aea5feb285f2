"""What stands for `python` on the PATH of documented commands: has the warm server run a command, and ends as it does.

usage: client.py SOCKET PYTHON [ARGUMENT ...]

Imports little (no pathlib), since it runs once per command. What the server does not know goes to Python itself.
"""

import json
import os
import signal
import socket
import sys

KNOWN = ("-m", "-c", "-")
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main() -> int:
    """Run the command and return its exit code."""
    where, python, *arguments = sys.argv[1:]
    plain = arguments[1:] if arguments[:1] == ["-u"] else arguments
    if not plain or not (plain[0] in KNOWN or plain[0].endswith(".py")):
        os.execv(python, [python, *arguments])
    request = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}  # noqa: PTH109
    text = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(where)
        socket.send_fds(server, [len(text).to_bytes(8, "big")], [0, 1, 2])
        server.sendall(text)
        reply = server.makefile()
        command = int(reply.readline())
        for number in FORWARDED:
            signal.signal(number, lambda number, _: os.kill(command, number))
        code = int(reply.readline())
    if code < 0:
        if -code in FORWARDED:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main())
