package main

import (
	"io/fs"
	"os"
	"path/filepath"
)

// fromPackaging are files of packaging/ and where they go.
var fromPackaging = []file{
	{from: "systemd/ipoibcm@.service", to: "/usr/lib/systemd/system/ipoibcm@.service"},
	{from: "systemd/ipoibcm-node.service", to: "/usr/lib/systemd/system/ipoibcm-node.service"},
	{from: "sysusers.d/ipoibcm.conf", to: "/usr/lib/sysusers.d/ipoibcm.conf"},
	{from: "tmpfiles.d/ipoibcm.conf", to: "/usr/lib/tmpfiles.d/ipoibcm.conf"},
	{from: "sysctl.d/10-ipoibcm.conf", to: "/usr/lib/sysctl.d/10-ipoibcm.conf"},
	{from: "networkd/10-ipoibcm.network", to: "/usr/lib/systemd/network/10-ipoibcm.network"},
	{from: "NetworkManager/90-ipoibcm.conf", to: "/usr/lib/NetworkManager/conf.d/90-ipoibcm.conf"},
	// iproute2 reads this directory in all its versions, and the one below /usr since 6.7.
	{from: "rt_protos.d/ipoibcm.conf", to: "/etc/iproute2/rt_protos.d/ipoibcm.conf", config: true},
	{from: "prometheus/ipoibcm.rules.yml", to: "/usr/share/doc/ipoibcm/examples/prometheus/ipoibcm.rules.yml"},
	{from: "grafana/ipoibcm.json", to: "/usr/share/doc/ipoibcm/examples/grafana/ipoibcm.json"},
	{from: "kubernetes/network.yaml", to: "/usr/share/doc/ipoibcm/examples/kubernetes/network.yaml"},
	{from: "kubernetes/node.yaml", to: "/usr/share/doc/ipoibcm/examples/kubernetes/node.yaml"},
	{from: "quadlet/ipoibcm@.container", to: "/usr/share/doc/ipoibcm/examples/quadlet/ipoibcm@.container"},
}

// fromTree installs files of the repository as they are.
func (b *build) fromTree() error {
	for _, f := range fromPackaging {
		f.from, f.mode = filepath.Join("packaging", f.from), 0o644
		if _, err := os.Stat(f.from); err != nil {
			return err
		}
		b.files = append(b.files, f)
	}
	b.files = append(b.files, file{to: "/etc/ipoibcm", mode: 0o750})
	return b.documents()
}

// documents installs the documents at the top of the tree, and all files below docs.
func (b *build) documents() error {
	for _, name := range []string{"README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md"} {
		b.add(name, "/usr/share/doc/ipoibcm/"+name, 0o644)
	}
	return filepath.WalkDir("docs", func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			b.add(path, "/usr/share/doc/ipoibcm/"+filepath.ToSlash(path), 0o644)
		}
		return err
	})
}
