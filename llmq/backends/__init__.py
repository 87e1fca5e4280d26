"""Running a model: the contract, the registry, and one package per framework."""
