"""What setup.cfg cannot say: the source distribution holds the tests and the examples, too."""

from setuptools import setup
from setuptools.command.sdist import sdist


class SourceDistribution(sdist):
    """All of a checkout, so that packagers can run the tests."""

    def make_distribution(self) -> None:
        for folder in (".ci", ".github", "examples", "tests"):
            self.filelist.graft(folder)
        files = (".editorconfig", ".gitignore", ".pre-commit-config.yaml", ".ruff.toml")
        self.filelist.extend([*files, "CHANGELOG.md"])
        self.filelist.global_exclude("*.py[cod]")
        self.filelist.prune("examples/runs")
        super().make_distribution()


setup(cmdclass={"sdist": SourceDistribution})
