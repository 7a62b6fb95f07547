from hypothesis import settings

# a shared CI core makes single examples slow; how many there are bounds the time
settings.register_profile("repository", deadline=None, derandomize=True)
settings.load_profile("repository")
