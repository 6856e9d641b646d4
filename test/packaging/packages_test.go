package packaging

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"encoding/json"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ipoibcm/internal/long"
)

// Two builds of one commit are the same octets, whoever builds where and when.
func TestReproducible(t *testing.T) {
	long.Only(t)
	var first []string
	for _, format := range []string{"deb", "rpm", "image"} {
		first = append(first, built(t, format))
	}
	dir := t.TempDir()
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	t.Setenv("TZ", "Asia/Tokyo")
	t.Setenv("LC_ALL", "C")
	command(t, "sh", "-c", "umask 077 && go run ./internal/packages -out '"+dir+"'")
	for i, format := range []string{"deb", "rpm", "image"} {
		second := one(t, dir, format)
		if got, want := hashOf(t, second), hashOf(t, first[i]); got != want {
			t.Errorf("%s: the second build has %s, the first %s", filepath.Base(second), got, want)
		}
	}
}

func hashOf(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])
}

// wanted is some of what both packages have, and its mode.
var wanted = map[string]string{
	"/usr/bin/ipoibcmd":                                                   "755",
	"/usr/lib/systemd/system/ipoibcm@.service":                            "644",
	"/usr/lib/systemd/system/ipoibcm-node.service":                        "644",
	"/usr/lib/sysusers.d/ipoibcm.conf":                                    "644",
	"/usr/lib/tmpfiles.d/ipoibcm.conf":                                    "644",
	"/usr/lib/sysctl.d/10-ipoibcm.conf":                                   "644",
	"/usr/lib/systemd/network/10-ipoibcm.network":                         "644",
	"/usr/lib/NetworkManager/conf.d/90-ipoibcm.conf":                      "644",
	"/etc/iproute2/rt_protos.d/ipoibcm.conf":                              "644",
	"/usr/share/bash-completion/completions/ipoibcmd":                     "644",
	"/usr/share/fish/vendor_completions.d/ipoibcmd.fish":                  "644",
	"/usr/share/man/man8/ipoibcmd.8.gz":                                   "644",
	"/usr/share/man/man8/ipoibcmd-run.8.gz":                               "644",
	"/usr/share/doc/ipoibcm/README.md":                                    "644",
	"/usr/share/doc/ipoibcm/docs/install.md":                              "644",
	"/usr/share/doc/ipoibcm/copyright":                                    "644",
	"/usr/share/doc/ipoibcm/ipoibcm.spdx.json":                            "644",
	"/usr/share/doc/ipoibcm/examples/ibcm0.yaml":                          "644",
	"/usr/share/doc/ipoibcm/licenses/std/LICENSE":                         "644",
	"/usr/share/doc/ipoibcm/licenses/github.com/spf13/cobra/LICENSE.txt":  "644",
	"/usr/share/doc/ipoibcm/licenses/github.com/prometheus/common/NOTICE": "644",
}

// unpacked unpacks a package as its own tools do.
func unpacked(t *testing.T, format string) string {
	t.Helper()
	path, dir := built(t, format), t.TempDir()
	if format == "deb" {
		need(t, "dpkg-deb")
		command(t, "dpkg-deb", "--extract", path, dir)
		return dir
	}
	need(t, "rpm", "rpm2archive", "tar")
	command(t, "sh", "-c", "rpm2archive - < '"+path+"' | tar -xz -C '"+dir+"'")
	return dir
}

// Both packages have everything, with the rights it should have.
func TestContents(t *testing.T) {
	for format, completion := range map[string]string{"deb": "vendor-completions", "rpm": "site-functions"} {
		dir := unpacked(t, format)
		all := maps.Clone(wanted)
		all["/usr/share/zsh/"+completion+"/_ipoibcmd"] = "644"
		all[map[string]string{"deb": "/usr/lib/cni/ipoibcm", "rpm": "/usr/libexec/cni/ipoibcm"}[format]] = "755"
		for path, mode := range all {
			info, err := os.Stat(dir + path)
			if err != nil {
				t.Errorf("%s: %v", format, err)
				continue
			}
			if got := strings.TrimLeft(info.Mode().Perm().String(), "-"); got != map[string]string{
				"644": "rw-r--r--", "755": "rwxr-xr-x"}[mode] {
				t.Errorf("%s: %s has mode %s, want %s", format, path, got, mode)
			}
		}
		if info, err := os.Stat(dir + "/etc/ipoibcm"); err != nil {
			t.Errorf("%s: %v", format, err)
		} else if got, want := info.Mode().Perm(), os.FileMode(0o750); got != want {
			t.Errorf("%s: /etc/ipoibcm has mode %o, want %o", format, got, want)
		}
		linksHold(t, format, dir+"/usr/share/doc/ipoibcm")
		startsAnywhere(t, dir+"/usr/bin/ipoibcmd")
	}
}

// linksHold checks that what README.md and the pages of the documentation name of each other, of
// pictures and of data is in the package. Links to the source lead out of it.
func linksHold(t *testing.T, format, dir string) {
	t.Helper()
	links := 0
	err := filepath.WalkDir(dir, func(page string, d fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(page) != ".md" {
			return err
		}
		text, err := os.ReadFile(page)
		for _, part := range strings.Split(string(text), "](")[1:] {
			target, _, _ := strings.Cut(part, ")")
			target, _, _ = strings.Cut(target, "#")
			path := filepath.Join(filepath.Dir(page), target)
			if target == "" || strings.Contains(target, "://") || !strings.HasPrefix(path, dir+"/docs/") {
				continue
			}
			links++
			if _, err := os.Stat(path); err != nil {
				t.Errorf("%s: %s names %s, which is not in the package", format, strings.TrimPrefix(page, dir), target)
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if links < 100 {
		t.Errorf("%s: the pages have %d links, want more", format, links)
	}
}

// startsAnywhere checks that a program needs no library, and does not know where it
// was built.
func startsAnywhere(t *testing.T, program string) {
	t.Helper()
	text, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(text, []byte("ld-linux")) {
		t.Error("the program is linked dynamically")
	}
	here, err := filepath.Abs(root)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(text, []byte(here+"/")) {
		t.Errorf("the program contains %s, where it was built", here)
	}
}

// lintian knows nothing worse of the Debian package than what is meant.
func TestLintian(t *testing.T) {
	long.Only(t)
	need(t, "lintian")
	path := built(t, "deb")
	meant := []string{
		"statically-linked-binary",          // of Go, and runs on any Linux
		"maintainer-script-calls-systemctl", // not debhelper's: one script for both formats
		"non-standard-dir-perm",             // settings may name peers: docs/adr/0025
		"unknown-field",                     // License, which nfpm writes
		"wrong-name-for-upstream-changelog", // README names it
		"initial-upload-closes-no-bugs",     // it is not Debian's
	}
	out, err := exec.Command("lintian", "--allow-root", "--fail-on", "none", path).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for line := range strings.Lines(string(out)) {
		kind, rest, _ := strings.Cut(line, ": ")
		_, tag, _ := strings.Cut(rest, ": ")
		tag, _, _ = strings.Cut(strings.TrimSpace(tag), " ")
		if kind != "E" && kind != "W" {
			continue
		}
		if !slices.Contains(meant, tag) {
			t.Errorf("%s", strings.TrimSpace(line))
		}
	}
}

// rpm finds its digests right, and both packages have the same files.
func TestRPM(t *testing.T) {
	need(t, "rpm", "rpm2archive", "dpkg-deb")
	path := built(t, "rpm")
	if got := command(t, "rpm", "-K", "--nosignature", path); !strings.HasSuffix(got, ": digests OK\n") {
		t.Errorf("rpm -K says %q", got)
	}
	if got := command(t, "rpm", "-qp", "--requires", path); strings.Contains(got, "lib") {
		t.Errorf("it requires %q, want no library", got)
	}
	listed := strings.Fields(command(t, "rpm", "-qpl", path))
	for name := range wanted {
		if !slices.Contains(listed, name) {
			t.Errorf("rpm -qpl does not name %s", name)
		}
	}
	if got := command(t, "rpm", "-qpc", path); got != "/etc/iproute2/rt_protos.d/ipoibcm.conf\n" {
		t.Errorf("configuration files are %q", got)
	}
	deb, rpm := hashesBelow(t, unpacked(t, "deb")), hashesBelow(t, unpacked(t, "rpm"))
	for _, sum := range []map[string]string{deb, rpm} {
		maps.DeleteFunc(sum, func(name, _ string) bool {
			return strings.Contains(name, "/zsh/") || strings.Contains(name, "/cni/") || strings.Contains(name, "changelog")
		})
	}
	if !maps.Equal(deb, rpm) {
		t.Errorf("the Debian package has %v, the other %v", deb, rpm)
	}
}

// hashesBelow returns the hash of each file below a directory.
func hashesBelow(t *testing.T, dir string) map[string]string {
	t.Helper()
	sums := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			sums[strings.TrimPrefix(path, dir)] = hashOf(t, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return sums
}

// The bill of materials names what the program's build information does, with a
// licence each, and the program by its hash.
func TestBill(t *testing.T) {
	dir := unpacked(t, "deb")
	text, err := os.ReadFile(dir + "/usr/share/doc/ipoibcm/ipoibcm.spdx.json")
	if err != nil {
		t.Fatal(err)
	}
	var doc struct {
		SPDXVersion string
		Packages    []struct {
			SPDXID, Name, VersionInfo, LicenseDeclared string
			Checksums                                  []struct{ Algorithm, ChecksumValue string }
		}
		Relationships []struct{ SPDXElementID, RelationshipType, RelatedSPDXElement string }
	}
	if err := json.Unmarshal(text, &doc); err != nil {
		t.Fatal(err)
	}
	names := map[string]string{} // by what the document calls them
	for _, p := range doc.Packages {
		names[p.SPDXID] = p.Name + " " + p.VersionInfo
		if p.LicenseDeclared == "" {
			t.Errorf("%s has no licence", p.Name)
		}
	}
	for i, path := range []string{"/usr/bin/ipoibcmd", "/usr/lib/cni/ipoibcm"} {
		info, err := buildinfo.ReadFile(dir + path)
		if err != nil {
			t.Fatal(err)
		}
		want := []string{"std " + info.GoVersion}
		for _, m := range info.Deps {
			want = append(want, m.Path+" "+m.Version)
			if _, err := os.Stat(dir + "/usr/share/doc/ipoibcm/licenses/" + m.Path); err != nil {
				t.Errorf("the texts of its licence: %v", err)
			}
		}
		var got []string
		for _, r := range doc.Relationships {
			if r.SPDXElementID == doc.Packages[i].SPDXID {
				got = append(got, names[r.RelatedSPDXElement])
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("for %s it has %q, the program %q", path, got, want)
		}
		if got, want := doc.Packages[i].Checksums[0].ChecksumValue, hashOf(t, dir+path); got != want {
			t.Errorf("it says that %s has SHA-256 %s, it has %s", path, got, want)
		}
	}
}

// An image of the OCI, as far as it is looked at here.
type ociImage struct {
	blobs    map[string][]byte
	manifest struct {
		Config descriptor
		Layers []descriptor
	}
	config struct {
		Architecture string
		Config       struct {
			User       string
			Entrypoint []string
		}
		RootFS struct {
			DiffIDs []string `json:"diff_ids"`
		}
	}
	files map[string]*tar.Header
}

type descriptor struct {
	Digest string
	Size   int
}

// Every digest and size of the image is right, and its layer has the program with the
// one capability that it needs.
func TestImage(t *testing.T) {
	im := readImage(t, built(t, "image"))
	for _, d := range append(im.manifest.Layers, im.manifest.Config) {
		content, ok := im.blobs["blobs/"+strings.Replace(d.Digest, ":", "/", 1)]
		if !ok {
			t.Fatalf("there is no blob %s", d.Digest)
		}
		if len(content) != d.Size {
			t.Errorf("%s has %d octets, want %d", d.Digest, len(content), d.Size)
		}
	}
	for name, content := range im.blobs {
		sum := sha256.Sum256(content)
		if got := "blobs/sha256/" + hex.EncodeToString(sum[:]); strings.HasPrefix(name, "blobs/") && got != name {
			t.Errorf("%s has digest %s", name, got)
		}
	}
	if got, want := im.config.Config.User, "65532:65532"; got != want {
		t.Errorf("it runs as %q, want %s", got, want)
	}
	program := im.files["usr/bin/ipoibcmd"]
	if program == nil {
		t.Fatal("the layer has no program")
	}
	const capability = "\x00\x00\x00\x02\x00\x10\x00\x00" + "\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
	if got := program.PAXRecords["SCHILY.xattr.security.capability"]; got != capability {
		t.Errorf("the program's capabilities are %q, want CAP_NET_ADMIN permitted: %q", got, capability)
	}
	for _, name := range []string{"usr/share/doc/ipoibcm/copyright", "usr/share/doc/ipoibcm/licenses/std/LICENSE",
		"run/ipoibcm/", "etc/ipoibcm/"} {
		if im.files[name] == nil {
			t.Errorf("the layer has no %s", name)
		}
	}
}

func readImage(t *testing.T, path string) (im ociImage) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	im.blobs, im.files = map[string][]byte{}, map[string]*tar.Header{}
	eachFile(t, f, func(h *tar.Header, content []byte) { im.blobs[h.Name] = content })
	var index struct{ Manifests []descriptor }
	decode := func(d descriptor, v any) {
		t.Helper()
		if err := json.Unmarshal(im.blobs["blobs/"+strings.Replace(d.Digest, ":", "/", 1)], v); err != nil {
			t.Fatal(err)
		}
	}
	if err := json.Unmarshal(im.blobs["index.json"], &index); err != nil {
		t.Fatal(err)
	}
	decode(index.Manifests[0], &im.manifest)
	decode(im.manifest.Config, &im.config)
	packed := im.blobs["blobs/"+strings.Replace(im.manifest.Layers[0].Digest, ":", "/", 1)]
	z, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		t.Fatal(err)
	}
	layer, err := io.ReadAll(z)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(layer)
	if got, want := "sha256:"+hex.EncodeToString(sum[:]), im.config.RootFS.DiffIDs[0]; got != want {
		t.Errorf("the layer unpacked has digest %s, the configuration says %s", got, want)
	}
	eachFile(t, bytes.NewReader(layer), func(h *tar.Header, _ []byte) { im.files[h.Name] = h })
	return im
}

// eachFile calls f with every file of an archive.
func eachFile(t *testing.T, r io.Reader, f func(*tar.Header, []byte)) {
	t.Helper()
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if err == io.EOF {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(tr)
		if err != nil {
			t.Fatal(err)
		}
		f(h, content)
	}
}
