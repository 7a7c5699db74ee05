"""The command line of several replicas, and their metrics as one text."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from api.settings import ConfigFault, ServerSettings
from deploy import ray_serve
from deploy.replicas.metrics import merge_metrics
from deploy.replicas.settings import ReplicaSettings, parse_replica_command, replica_flags
from engine.config import EngineConfig, flag_rows


def test_words_are_shared_out() -> None:
    words = ["--max-replicas", "4", "--port", "7999", "--max-num-seqs", "7", "--replica-gpus=0.5"]
    command = parse_replica_command(words, {"SWITCHBOARD_MIN_REPLICAS": "3", "SWITCHBOARD_MAX_LORAS": "5"})
    assert command.replicas == ReplicaSettings(min_replicas=3, max_replicas=4, replica_gpus=0.5)
    assert (command.app.server.port, command.app.engine.max_num_seqs, command.app.engine.max_loras) == (7999, 7, 5)


def test_no_flag_has_two_meanings() -> None:
    taken = {row[0] for table in (EngineConfig, ServerSettings) for row in flag_rows(table)}
    assert not taken & set(replica_flags())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--min-replicas", "0"], "--min-replicas is 0, but must be 1 or more"),
        (["--min-replicas", "x"], "--min-replicas"),
        (["--min-replicas", "3", "--max-replicas", "2"], "--min-replicas (3) or more"),
        (["--port", "0"], "name one"),
        (["--max-replica", "2"], "unknown flag --max-replica"),
        (["--host", "0.0.0.0"], "no credential is set"),
    ],
)
def test_wrong_words_are_one_sentence(words: list[str], told: str) -> None:
    with pytest.raises(ConfigFault) as caught:
        parse_replica_command(words, {})
    assert told in caught.value.message and "\n" not in caught.value.message


def test_wrong_words_end_the_command_before_anything_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert ray_serve.main(["--min-replicas", "0"]) == 2
    assert capsys.readouterr().err == "ray_serve: error: --min-replicas is 0, but must be 1 or more.\n"


def test_a_config_file_may_hold_flags_alone() -> None:
    with pytest.raises(ConfigFault, match="holds 'replicas'"):
        ray_serve.build({"flags": "", "replicas": 3})


def test_metrics_of_replicas_are_one_valid_text() -> None:
    texts = [
        (
            name,
            f'# HELP n Requests.\n# TYPE n gauge\nn{{route="a b"}} {index}\n# HELP m M.\n# TYPE m gauge\nm {index}.5\n',
        )
        for index, name in enumerate(("r1", "r2"))
    ]
    families = {family.name: family for family in text_string_to_metric_families(merge_metrics(texts))}
    assert [(sample.labels, sample.value) for sample in families["n"].samples] == [
        ({"replica": "r1", "route": "a b"}, 0.0),
        ({"replica": "r2", "route": "a b"}, 1.0),
    ]
    assert [sample.value for sample in families["m"].samples] == [0.5, 1.5]
