"""Each rough edge that a new user hit, and the test that fails without its mend."""

import ast
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
TABLE = """
tiers add, then its own hint: a drive's room is halved without a word
    tests/daemon/server/test_tiers.py::test_what_is_saved_gives_every_drive_its_room_again
sim ignores options
    tests/sim/test_cli_sim.py::test_options_without_effect_are_refused
sim --history-tokens 600000 is a traceback
    tests/sim/test_cli_sim.py::test_prompts_longer_than_gpu_memory_are_told
a closed stdout is a traceback
    tests/cli/test_main.py::test_a_closed_stdout_is_one_error
an early Ctrl-C is a traceback
    tests/cli/test_main.py::test_ctrl_c_while_it_starts_leaves_no_trace
KVDEPOT_PORT of a Kubernetes service ends the daemon
    tests/core/test_config.py::test_variables_of_a_kubernetes_service_are_not_settings
bench io --path makes and leaves folders
    tests/cli/test_bench.py::test_folders_are_not_made
config check says ok to 900 TiB on a missing path
    tests/cli/test_config_command.py::test_check_looks_for_the_room_on_the_disk
500 GiB on a disk of 66 GB is accepted silently
    tests/cli/test_config_command.py::test_a_store_that_is_larger_than_its_disk_is_warned_about
plan sells tiers that do not exist
    tests/planner/test_plan.py::test_tiers_that_do_not_exist_are_not_sold
plan sells codecs that do not exist
    tests/planner/test_plan.py::test_codecs_that_do_not_exist_are_not_sold
plan cannot read what plan --show prints
    tests/planner/test_plan.py::test_what_show_prints_can_be_planned
record into a missing folder: a wrong hint
    tests/daemon/server/test_record.py::test_hints_say_what_is_in_the_way
--set goal…: a wrong hint
    tests/planner/test_plan.py::test_hints_lead_on
--tp 3 names another field
    tests/sim/test_cli_sim.py::test_the_wrong_option_is_named
--json, and errors are text
    tests/cli/test_main.py::test_errors_are_json_where_json_was_asked_for
sizes as raw bytes
    tests/daemon/server/test_tiers.py::test_room_and_mode
plurals
    tests/sim/test_cli_sim.py::test_one_request_is_no_requests
tables wider than the terminal
    tests/cli/test_main.py::test_tables_fit_the_terminal
no colour
    tests/cli/test_main.py::test_colour_is_for_terminals_that_want_it
no completion
    tests/cli/test_main.py::test_completion_knows_every_command
--socket is needed each time
    tests/daemon/server/test_serve.py::test_by_default_it_listens_in_the_runtime_folder
a trace file that the docs name is nowhere
    tests/sim/test_cli_sim.py::test_a_trace_that_is_not_there
Azure traces print 0.0000 without saying why
    tests/sim/test_cli_sim.py::test_a_trace_in_which_nothing_returns_says_so
a sim that is overloaded says nothing
    tests/sim/test_cli_sim.py::test_an_overloaded_fleet_says_so
kvdepot.opne() passes mypy
    tests/test_api.py::test_type_checkers_find_a_name_that_is_not_there
errors are not exported
    tests/test_api.py::test_every_error_can_be_caught_by_its_name
no repr
    tests/test_api.py::test_a_store_tells_what_it_is
[hf] replaces a site's CUDA torch
    tests/cli/test_rough_edges.py::test_the_extra_keeps_a_torch_that_is_there
"""
LINES = TABLE.strip().splitlines()
EDGES = dict(zip(LINES[::2], map(str.strip, LINES[1::2]), strict=True))


@pytest.mark.parametrize("edge", EDGES)
def test_every_rough_edge_has_a_test(edge: str) -> None:
    path, name = EDGES[edge].split("::")
    found = ast.walk(ast.parse((ROOT / path).read_text()))
    assert name in {node.name for node in found if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("there", ["2.6.0", "2.7.1+cu128", "2.13.0+cpu", "3.0.0a1+rocm"])
def test_the_extra_keeps_a_torch_that_is_there(there: str) -> None:
    """pip leaves alone what satisfies the requirement, whichever index it came from."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(text) for text in project["optional-dependencies"]["hf"]]
    (torch,) = (one for one in wanted if one.name == "torch")
    assert torch.specifier.contains(there, prereleases=True) and torch.url is None
