"""The options of a simulation are those of its configuration, and a report's command line gives the same again."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from pollux.cli.option_groups import OptionGroup, expanded
from pollux.cli.policy_options import POLICY_OPTIONS, PolicyOptions, Switch, Weights, said_settings
from pollux.cli.simulation_options import OPTIONS, PhysicsName, SimulationOptions, said_options
from pollux.errors import InvalidValueError
from pollux.policy import WEIGHTINGS, PolicySettings
from pollux.simulator.config import SimulationConfig
from pollux.simulator.physics import PHYSICS

# Fields of a configuration that only Python sets.
WITHOUT_OPTION = {
    *("profiles_types", "guesses_types", "profiled_batches", "start_s", "batch_threshold", "budget_window_s"),
    *("node_start_s", "counts_efficiency", "rounds_epochs", "entitlements", "fits_published", "keeps_deadlines"),
}
SECOND_OF_RANGE = {"max_nodes", "high"}


def test_every_field_has_an_option_or_is_known_to_have_none():
    fields = {field.name for field in dataclasses.fields(SimulationConfig)}
    options = {option.field for option in OPTIONS if option.owner is SimulationConfig}
    assert options | SECOND_OF_RANGE | WITHOUT_OPTION == fields
    assert not options & WITHOUT_OPTION
    settings = {option.field for option in OPTIONS if option.owner is PolicySettings}
    assert settings <= {field.name for field in dataclasses.fields(PolicySettings)}


def test_the_choices_are_those_there_are():
    assert [choice.value for choice in PhysicsName] == list(PHYSICS)
    assert tuple(choice.value for choice in Weights) == WEIGHTINGS


GIVEN: list[dict[str, Any]] = [
    {},
    {"nodes": 3, "gpus_per_node": 8, "interval": 30.0, "resize_s": 5.0, "interference": 0.25, "node_price": 2.5},
    {"autoscale": "1..8", "band": "0.4..0.7", "budget": 8.0, "events": Switch.ON, "profile_memory": Switch.ON},
    {"cluster": "aws:2x4,rtx:1x8", "physics": PhysicsName.SIA},
    {"physics": PhysicsName.SIA},
    {"physics": PhysicsName.SIA, "nodes": 16},
    {"charge_s": 12.0, "p": -2.0, "weights": Weights.REMAINING},
    {"exploration": 2.0, "first_replicas": 1, "avoid_interference": Switch.OFF},
    {"adapt_batches": Switch.OFF, "elastic": Switch.OFF, "efficiency": Switch.OFF, "weights": Weights.AUTO},
]


@pytest.mark.parametrize("given", GIVEN, ids=lambda given: " ".join(given) or "nothing")
def test_what_a_report_says_makes_the_same_simulation(given: dict[str, Any]):
    options = SimulationOptions(given)
    config = options.config()
    settings = options.settings(config, seed=3)
    again: list[SimulationOptions] = []
    app = typer.Typer()

    @app.command()
    @expanded
    def take(options: SimulationOptions) -> None:
        again.append(options)

    said = [str(word) for pair in said_options(config, settings, None) for word in pair]
    result = CliRunner().invoke(app, said)
    assert result.exit_code == 0, result.output
    assert again[0].config() == config
    assert again[0].settings(config, seed=3) == settings
    assert bool(said) == bool(given)


def test_a_server_takes_the_same_options_of_the_policy_and_says_them_again():
    """With its own settings where nothing is said: ``pollux up`` starts a detached server with what this says."""
    usual = PolicySettings(resize_s=1.0)
    typed = {"p": -2.0, "weights": Weights.AUTO, "exploration": 2.0, "elastic": Switch.OFF, "first_replicas": None}
    settings = PolicyOptions(typed).settings(usual)
    assert settings == dataclasses.replace(usual, p=-2.0, weights="auto", exploration=2.0, is_elastic=False)
    assert said_settings(settings, usual) == {
        "--p": -2.0,
        "--weights": "auto",
        "--exploration": 2.0,
        "--elastic": "off",
    }
    assert said_settings(usual, usual) == {} and PolicyOptions({}).settings(usual) == usual
    charged = PolicyOptions({"charge_s": 0.0}).settings(usual)
    assert (charged.resize_s, charged.charges_measured) == (0.0, False)
    assert said_settings(charged, usual) == {"--charge-s": 0.0}
    with pytest.raises(InvalidValueError, match="exploration by a factor of 0"):
        PolicyOptions({"exploration": 0.0}).settings(usual)
    names = {parameter.name for parameter in SimulationOptions.parameters()}
    assert {option.name for option in POLICY_OPTIONS} <= names


def test_both_ends_of_auto_scaling_are_needed():
    with pytest.raises(InvalidValueError, match="both the fewest and the most"):
        SimulationConfig(min_nodes=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place(OptionGroup):
    folder: Annotated[Path, typer.Option("--folder", help="Where.")]
    depth: Annotated[int, typer.Option("--depth", help="How deep.")] = 2


def test_a_group_is_expanded_into_its_options():
    app, seen = typer.Typer(), []

    @app.command()
    @expanded
    def look(name: Annotated[str, typer.Argument()], place: Place, loud: bool = False) -> None:
        """Look around."""
        seen.append((name, place, loud))

    assert CliRunner().invoke(app, ["a", "--folder", "x", "--loud"]).exit_code == 0
    assert seen == [("a", Place(folder=Path("x")), True)]
    shown = CliRunner().invoke(app, ["--help"]).output
    assert "Look around." in shown and "--depth" in shown and "How deep." in shown
    assert CliRunner().invoke(app, ["a"]).exit_code == 2  # --folder is needed
