"""The same as `first_allreduce.py` over plain sockets, without a framework: measures the launcher alone."""

import os
import socket
import sys
import time

rank = int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
size = int(os.environ.get("WORLD_SIZE") or os.environ["OMPI_COMM_WORLD_SIZE"])
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0:
    with socket.create_server(address, backlog=size) as server:
        peers = [server.accept()[0] for _ in range(size - 1)]
    total = 1 + sum(peer.recv(1)[0] for peer in peers)
    for peer in peers:
        peer.sendall(bytes([total]))
else:
    while True:
        try:
            peer = socket.create_connection(address)
            break
        except ConnectionRefusedError:  # rank 0 does not listen yet
            time.sleep(0.01)
    peer.sendall(bytes([1]))
    total = peer.recv(1)[0]
if total != size:
    raise SystemExit(f"the sum over {size} ranks is {total}")
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reports:
    reports.connect(sys.argv[1])
    reports.send(str(time.monotonic()).encode())
