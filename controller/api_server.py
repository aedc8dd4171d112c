"""The application in a thread or in the main thread, with event streams that do not hold up its shutdown."""

from __future__ import annotations

import socket
import threading

import uvicorn
from starlette.types import ASGIApp

from controller.view import Board


class BoardServer(uvicorn.Server):
    """A uvicorn server whose event streams do not hold up its shutdown: the board ends them first."""

    def __init__(self, config: uvicorn.Config, board: Board) -> None:
        super().__init__(config)
        self._board = board

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams, finish open requests, close."""
        self._board.close()
        await super().shutdown(sockets)


class ApiServer:
    """The application in a thread of its own."""

    def __init__(self, app: ASGIApp, board: Board, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._host, self._port = host, port
        config = uvicorn.Config(
            app, log_config=None, access_log=False, server_header=False, lifespan="off", timeout_graceful_shutdown=3
        )
        self._server = BoardServer(config, board)
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        """Bind, serve and return the URL (port 0 takes a free one); raises OSError when the address cannot be bound."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._socket = socket.create_server((self._host, self._port), family=family, backlog=128)
        host, port = self._socket.getsockname()[:2]
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="lenity-api", daemon=True
        )
        self._thread.start()
        return f"http://[{host}]:{port}" if family == socket.AF_INET6 else f"http://{host}:{port}"

    def stop(self, timeout: float = 5.0) -> bool:
        """End the event streams, finish open requests and stop; False when the thread outlived ``timeout`` seconds."""
        self._server.should_exit = True
        if self._thread is None or self._socket is None:
            return True
        self._thread.join(timeout)
        self._socket.close()
        return not self._thread.is_alive()
