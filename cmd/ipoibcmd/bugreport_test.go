package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"ipoibcm/internal/expect"
)

// unpack returns the files of a report.
func unpack(t *testing.T, file string) map[string]string {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if err == io.EOF {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		out[strings.TrimPrefix(h.Name, "r/")] = string(b)
	}
}

// What cannot be had is named and keeps nothing else out; what is too long is cut; and all
// of it has a bound.
func TestBugreport(t *testing.T) {
	give := func(n int) func(context.Context) ([]byte, error) {
		return func(context.Context) ([]byte, error) { return bytes.Repeat([]byte("x"), n), nil }
	}
	items := []reportItem{
		{"a", "here", give(5)},
		{"b", "there", func(context.Context) ([]byte, error) { return nil, errors.New("no\nsuch thing") }},
		{"c", "here", give(maxReport + 1)},
	}
	for range maxReport / maxReportItem {
		items = append(items, reportItem{"d", "here", give(maxReportItem)})
	}
	items = append(items, reportItem{"e", "here", give(5)})
	file := filepath.Join(t.TempDir(), "r.tar.gz")
	if err := bugreport(t.Context(), time.Now(), file, items); err != nil {
		t.Fatal(err)
	}
	got := unpack(t, file)
	expect.Equal(t, len(got["a"]), 5, "octets of a")
	expect.Equal(t, len(got["e"]), 5, "octets of e")
	if n := len(got["c"]); n != maxReportItem {
		t.Errorf("c has %d octets, want %d", n, maxReportItem)
	}
	for _, want := range []string{"missing: no such thing (there)",
		fmt.Sprintf("%-24s %d octets, cut after 2 MiB", "c", maxReportItem), "the report has 16 MiB already"} {
		if !strings.Contains(got["CONTENTS"], want) {
			t.Errorf("CONTENTS does not say %q:\n%s", want, got["CONTENTS"])
		}
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, mode %v; want 0600", err, info.Mode())
	}
	if err := bugreport(t.Context(), time.Now(), file, items); err == nil ||
		!strings.Contains(err.Error(), "there already") {
		t.Errorf("a second report to the same file: %v", err)
	}
}

// Secrets of the configuration stay here, however they are written.
func TestBugreportConfig(t *testing.T) {
	for _, tt := range []struct{ name, in, want string }{
		{"keys of a line", "name: ibcm0\nqkey: 0x12345\nmembership:\n  password: 12345 # of etcd\nmode: rc\n",
			"name: ibcm0\nqkey: left out\nmembership:\n  password: left out\nmode: rc\n"},
		{"items of a list", "interfaces:\n  - qkey: 0x12345\n  - {name: b, qkey: 0x12345}\n",
			"interfaces:\n  - qkey: left out\n  - {name: b, qkey: left out}\n"},
		{"JSON", `{"mode": "rc", "qkey": 12345}`, "{\"mode\": \"rc\", \"qkey\": left out}\n"},
		{"an alias", "name: &k 0x12345\nqkey: *k\n", "name: &k left out\nqkey: *k\n"},
		{"a list", "password: [12345]\n", "password: left out\n"},
		{"several lines", "token: |\n  12345\n  12345\nmode: rc\n", "token: left out\nmode: rc\n"},
		{"comments", "# qkey: 0x12345\nmode: rc # 0x12345\n# 12345\n", "mode: rc\n"},
		{"no YAML", "mode: rc\nqkey: \"0x12345\n", ""},
		{"two documents", "mode: rc\n---\nqkey: 0x12345\n", ""},
		{"no keys", "qkey=0x12345\n", ""},
	} {
		file := filepath.Join(t.TempDir(), "c.yaml")
		if err := os.WriteFile(file, []byte(tt.in), 0o600); err != nil {
			t.Fatal(err)
		}
		b, err := reportConfig(file)
		if failed := err != nil; failed != (tt.want == "") {
			t.Errorf("%s: error %v, want one: %v", tt.name, err, tt.want == "")
		}
		if string(b) != tt.want {
			t.Errorf("%s: got\n%s\nwant\n%s", tt.name, b, tt.want)
		}
		if err != nil && strings.Contains(strings.ReplaceAll(err.Error(), file, ""), "12345") {
			t.Errorf("%s: the secret is in %q", tt.name, err)
		}
	}
}

// A wrong Q_Key is a secret all the same: the error of the examination does not have it.
func TestBugreportDoctor(t *testing.T) {
	file := filepath.Join(t.TempDir(), "c.yaml")
	for _, wrong := range []string{"0x1234567890", "1234567.5", "12345z", "[12345]", "-12345"} {
		if err := os.WriteFile(file, []byte("underlay: lo\nqkey: "+wrong+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := reportDoctor(t.Context(), file)
		if err == nil {
			t.Errorf("a Q_Key %s is accepted", wrong)
			continue
		}
		if text := strings.ReplaceAll(err.Error(), file, ""); strings.Contains(text, "1234") {
			t.Errorf("the Q_Key is in %q", text)
		}
		if want := "line 2: qkey: want a whole number"; !strings.Contains(err.Error(), want) {
			t.Errorf("a Q_Key %s: %v, want %q", wrong, err, want)
		}
	}
}

// Keys of the kernel are named, and not read.
func TestBugreportFiles(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"mtu", "stable_secret", "netdev_rss_key"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("12345\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	b, err := reportFiles(dir + "/*")
	if err != nil {
		t.Fatal(err)
	}
	want := dir + "/mtu: 12345\n" + dir + "/netdev_rss_key: left out\n" + dir + "/stable_secret: left out\n"
	expect.Equal(t, string(b), want, "files")
}

func TestRedactJSON(t *testing.T) {
	v := redactJSON(map[string]any{"qpn": "0x123456", "n": 1234567.0,
		"l": []any{"comm=abcdef01", "10.0.0.1"}}).(map[string]any)
	if v["qpn"] != "redacted" {
		t.Errorf("a QPN is %v", v["qpn"])
	}
	if v["n"] != 1234567.0 {
		t.Errorf("a count is %v", v["n"])
	}
	if got, want := v["l"].([]any)[:2], []any{"redacted", "10.0.0.1"}; !slices.Equal(got, want) {
		t.Errorf("a list is %v, want %v", got, want)
	}
}
