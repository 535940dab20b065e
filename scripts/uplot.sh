#!/usr/bin/env bash
# Takes uPlot, the plotting library of the report's page, into the tree: `scripts/uplot.sh 1.6.32`. Needs npm.
# Look at the page afterwards; tests/integration/test_report_browser.py says whether it still works.
set -euo pipefail
version=${1:?name a version: npm view uplot version prints the newest}
there=$(cd "$(dirname "$0")/.." && pwd)/clusterkit/observe/report/uplot
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm pack --silent "uplot@$version" >/dev/null
tar -xzf "uplot-$version.tgz"
cd package
cp LICENSE dist/uPlot.iife.min.js dist/uPlot.min.css "$there"
cd "$there"
{
  echo "uplot $version"
  sha256sum LICENSE uPlot.iife.min.js uPlot.min.css
} >PINNED
cat PINNED
