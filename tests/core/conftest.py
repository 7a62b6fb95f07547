from hypothesis import settings

# no deadline per example, because examples are slow on shared CI cores
settings.register_profile("repository", deadline=None, derandomize=True)
settings.load_profile("repository")
