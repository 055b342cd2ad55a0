"""The config of a trial as the source of an experiment file."""

from ml_collections import config_dict


def write_source(config: config_dict.ConfigDict, docstring: str) -> str:
    """The source of a Python file whose `get_config` returns the config."""
    # The docstring may contain the name of a study, which a user has chosen. Nothing in it may end
    # the docstring.
    escaped = (line.encode("unicode_escape").decode() for line in docstring.split("\n"))
    text = "\n".join(escaped).replace('"', "'")
    lines = [
        f'"""{text}"""',
        "",
        "from ml_collections import config_dict",
        "",
        "",
        'def get_config(variant=""):',
        '    """The config of this trial."""',
        '    assert not variant, "this experiment has no variants"',
        "    config = config_dict.ConfigDict()",
    ]
    for key in config:
        value = config[key]
        if isinstance(value, config_dict.ConfigDict):
            lines.append(f"    config.{key} = dict(")
            lines += [f"        {name}={_literal(value, name)}," for name in value]
            lines.append("    )")
        else:
            lines.append(f"    config.{key} = {_literal(config, key)}")
    return "\n".join([*lines, "    return config.lock()", ""])


def _literal(section: config_dict.ConfigDict, key: str) -> str:
    value = section[key]
    if value is None:
        return f"config_dict.placeholder({section.get_type(key).__name__})"
    return repr(value)
