"""Flower's simulation (Ray behind it), one core for each of its actors: FedAvg over all clients, one step each.

    python flower.py cnn|small ITERATIONS        # in an environment with flwr[simulation] and torch
"""

from __future__ import annotations

import os
from typing import Any

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from workload import LEARNING_RATE, WORKLOADS, Stopwatch, arguments, loaded, loss_of


def client_app(name: str) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        workload = WORKLOADS[name]
        model, inputs, labels = loaded(name)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        peer, iteration = int(context.node_config["partition-id"]), int(message.content["config"]["server-round"])
        rows = workload.rows(peer, iteration, len(labels))
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        optimizer.zero_grad()
        loss = loss_of(model, torch.from_numpy(inputs[rows]), torch.from_numpy(labels[rows]))
        loss.backward()
        optimizer.step()
        metrics = MetricRecord({"loss": loss.item(), "num-examples": len(rows)})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    return app


class TimedFedAvg(FedAvg):
    """FedAvg that says when a round is over; the first round's clock starts when it is configured."""

    watch: Stopwatch | None = None

    def configure_train(self, server_round: int, *args: Any) -> Any:
        self.watch = self.watch or Stopwatch()
        return super().configure_train(server_round, *args)

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        arrays, metrics = super().aggregate_train(server_round, replies)
        assert self.watch is not None
        self.watch.lap(float(metrics["loss"]) if metrics else None)
        return arrays, metrics


def main() -> None:
    workload, iterations = arguments()
    server = ServerApp()

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        everybody = workload.peers
        strategy = TimedFedAvg(fraction_evaluate=0.0, min_train_nodes=everybody, min_available_nodes=everybody)
        strategy.start(grid=grid, initial_arrays=ArrayRecord(workload.model().state_dict()), num_rounds=iterations)

    backend = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"_node_ip_address": "127.0.0.1", "include_dashboard": False},
    }
    run_simulation(server, client_app(workload.name), num_supernodes=workload.peers, backend_config=backend)


if __name__ == "__main__":
    main()
