"""Every key of every variant of the experiments, kept in `data/resolved_configs.json`.

    python -m tests.resolved_configs

records them anew. That is right only if CHANGELOG.md names the experiment whose values change.
For each file there are the types of all keys, the values of its default variant, and what every
other variant changes of them.
"""

import itertools
import json
import pathlib
from unittest import mock

from ml_collections import config_dict

from mogrifier_jax import configs

ROOT = pathlib.Path(__file__).parents[1]
PATH = ROOT / "tests" / "data" / "resolved_configs.json"


def flatten(config, prefix=""):
    """(type, value as JSON has it) of every key; a placeholder has a type and the value None."""
    found = {}
    for key in config:
        if isinstance(config[key], config_dict.ConfigDict):
            found |= flatten(config[key], f"{prefix}{key}.")
        else:
            value = json.loads(json.dumps(config[key]))
            found[prefix + key] = (config.get_type(key).__name__, value)
    return found


def differences(config, recorded, variant):
    """Recorded keys that a config lacks or has otherwise; keys that were added do not matter."""
    found = flatten(config)
    values = recorded["values"] | recorded["changes"][variant]
    expected = {key: (recorded["types"][key], value) for key, value in values.items()}
    return {key: found.get(key) for key, pair in expected.items() if found.get(key) != pair}


def find_variants(module):
    """All combinations that a file has, by the groups among which it chooses."""
    choose = configs.choose
    with mock.patch.object(configs, "choose", side_effect=choose) as spy:
        module.get_config()
    groups = [tuple(group) for group in spy.call_args.args[1:]]
    return [",".join(filter(None, names)) for names in itertools.product(*groups)]


def record_file(path):
    module = configs.load_file(str(path))
    base = flatten(module.get_config())
    changes = {}
    for variant in find_variants(module):
        found = flatten(module.get_config(variant))
        assert {k: kind for k, (kind, _) in found.items()} == {k: v[0] for k, v in base.items()}
        changes[variant] = {k: value for k, (_, value) in found.items() if value != base[k][1]}
    return {
        "types": {key: kind for key, (kind, _) in base.items()},
        "values": {key: value for key, (_, value) in base.items()},
        "changes": changes,
    }


def record():
    files = sorted((ROOT / "experiments").glob("*.py"))
    recorded = {path.name: record_file(path) for path in files}
    PATH.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    record()
