package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"ipoibcm/internal/gotool"
)

// nfpm writes the packages.
var nfpm = gotool.Program{Module: "github.com/goreleaser/nfpm/v2", Version: "v2.43.4", Package: "./cmd/nfpm"}

// An nfpmConfig is the configuration of nfpm. nfpm reads YAML, of which JSON is a subset.
type nfpmConfig struct {
	Name        string        `json:"name"`
	Arch        string        `json:"arch"`
	Platform    string        `json:"platform"`
	Version     string        `json:"version"`
	Schema      string        `json:"version_schema"`
	Release     string        `json:"release"`
	Section     string        `json:"section"`
	Priority    string        `json:"priority"`
	Maintainer  string        `json:"maintainer"`
	Description string        `json:"description"`
	Vendor      string        `json:"vendor"`
	License     string        `json:"license"`
	ModTime     time.Time     `json:"mtime"`
	Recommends  []string      `json:"recommends"`
	Contents    []nfpmContent `json:"contents"`
	Scripts     nfpmScripts   `json:"scripts"`
	RPM         nfpmRPM       `json:"rpm"`
	Deb         nfpmDeb       `json:"deb"`
}

type nfpmContent struct {
	Source   string       `json:"src,omitempty"`
	To       string       `json:"dst"`
	Type     string       `json:"type,omitempty"`
	Expand   bool         `json:"expand"`
	FileInfo nfpmFileInfo `json:"file_info"`
}

type nfpmFileInfo struct {
	Mode    os.FileMode `json:"mode"`
	Owner   string      `json:"owner"`
	Group   string      `json:"group"`
	ModTime time.Time   `json:"mtime"`
}

type nfpmScripts struct {
	PostInstall string `json:"postinstall"`
	PreRemove   string `json:"preremove"`
	PostRemove  string `json:"postremove"`
}

type nfpmRPM struct {
	Summary     string `json:"summary"`
	Compression string `json:"compression"`
	BuildHost   string `json:"buildhost"`
}

type nfpmDeb struct {
	Compression string `json:"compression"`
}

// maintainer is the maintainer that the packages name.
const maintainer = "The authors of ipoibcm <maintainers@users.noreply.a-seed-8805c6a3.example>"

const (
	summary     = "IP over InfiniBand connected mode on any Linux host"
	description = summary + "\n" +
		"ipoibcmd gives a host a network interface whose IP packets travel as IP over\n" +
		"InfiniBand, connected mode (RFC 4755), with an MTU of up to 65520 octets per\n" +
		"connection. A RoCEv2 engine in pure Go carries it over any Ethernet; neither\n" +
		"InfiniBand adapter nor kernel module is needed."
)

// config returns nfpm's configuration for the package in a format.
func (b *build) config(format string) nfpmConfig {
	c := nfpmConfig{
		Name: name, Arch: b.arch, Platform: "linux", Version: b.version, Schema: "none", Release: "1", Section: "net",
		Priority: "optional", Maintainer: maintainer, Vendor: "ipoibcm", Description: description,
		License: "Apache-2.0", ModTime: b.epoch, Recommends: []string{"systemd", "iproute2"},
		Scripts: nfpmScripts{"packaging/scripts/postinst", "packaging/scripts/prerm", "packaging/scripts/postrm"},
		RPM:     nfpmRPM{Summary: summary, Compression: "gzip", BuildHost: "localhost"}, Deb: nfpmDeb{Compression: "gzip"},
	}
	rename := strings.NewReplacer()
	if format == "rpm" {
		c.Recommends[1] = "iproute"
		rename = strings.NewReplacer("/zsh/vendor-completions/", "/zsh/site-functions/", "/usr/lib/cni/", "/usr/libexec/cni/")
	}
	for _, f := range b.files {
		if format == "rpm" && f.to == changelog {
			continue
		}
		f.to = rename.Replace(f.to)
		n := nfpmContent{Source: f.from, To: f.to,
			FileInfo: nfpmFileInfo{Mode: f.mode, Owner: "root", Group: "root", ModTime: b.epoch}}
		switch {
		case f.from == "":
			n.Type = "dir"
		case f.config:
			n.Type = "config|noreplace"
		}
		c.Contents = append(c.Contents, n)
	}
	return c
}

// nfpm writes a package.
func (b *build) nfpm(format, path string) error {
	program, err := nfpm.Build(b.ctx, b.cache)
	if err != nil {
		return err
	}
	text, err := json.MarshalIndent(b.config(format), "", "  ")
	if err != nil {
		return err
	}
	config := filepath.Join(b.dir, format+".yaml")
	if err := os.WriteFile(config, text, 0o644); err != nil {
		return err
	}
	c := exec.CommandContext(b.ctx, program, "package", "--config", config, "--packager", format, "--target", path)
	c.Env = append(os.Environ(), fmt.Sprintf("SOURCE_DATE_EPOCH=%d", b.epoch.Unix()))
	_, err = run(c)
	return err
}

// fileName returns the file name of the package in a format, which follows that format's rules.
func (b *build) fileName(format string) string {
	switch format {
	case "deb":
		return fmt.Sprintf("%s_%s-1_%s.deb", name, b.version, b.arch)
	case "rpm":
		return fmt.Sprintf("%s-%s-1.%s.rpm", name, b.version,
			map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[b.arch])
	}
	return fmt.Sprintf("%s-%s-%s.oci.tar", name, b.version, b.arch)
}
