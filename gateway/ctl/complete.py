"""What a shell offers after TAB: names of models, from the files alone, so that it is quick and needs no daemon."""


def complete_models(incomplete: str) -> list[str]:
    """Names and aliases of the configuration."""
    from gateway.config import ConfigError, default_home
    from gateway.configread import load_config

    try:
        models = load_config(default_home()).models.values()
    except ConfigError:
        # A shell has no place to say so; the verb itself will.
        return []
    names = [name for model in models for name in (model.name, *model.aliases) if "*" not in name]
    return [name for name in names if name.startswith(incomplete)]


def complete_downloaded(incomplete: str) -> list[str]:
    """Names of the configuration, and repositories in the Hugging Face cache."""
    from gateway.hfcache import cached_models

    names = [*complete_models(incomplete), *(name for name in cached_models() if name.startswith(incomplete))]
    return list(dict.fromkeys(names))
