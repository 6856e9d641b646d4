// Package vectors writes docs/vectors: packets, with every field and the clause
// that it comes from, and decisions. Octets are made twice, by our codecs and by
// packing the fields one behind the other; the files hold what both agree on.
//
//	go test ./test/vectors -update
//
// writes the files anew.
package vectors

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write docs/vectors anew")

// dir is where the files are.
var dir = filepath.Join("..", "..", "docs", "vectors")

// files are all of them, by name.
func files() map[string]file {
	return map[string]file{
		"ipoib":      ipoibFile(),
		"cm":         cmFile(),
		"crossing":   crossingFile(),
		"mtu":        mtuFile(),
		"mpa":        mpaFile(),
		"rpcrdma":    rpcrdmaFile(),
		"service-id": serviceIDFile(),
	}
}

// TestVectors holds the codecs to the fields, and the files to both.
func TestVectors(t *testing.T) {
	for name, f := range files() {
		t.Run(name, func(t *testing.T) {
			for i := range f.samples {
				f.samples[i].check(t)
			}
			for _, d := range f.Decisions {
				d.check(t)
			}
			if t.Failed() {
				return
			}
			got, path := f.render(), filepath.Join(dir, name+".json")
			if *update {
				if err := os.WriteFile(path, got, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, want) {
				t.Errorf("%s is out of date: go test ./test/vectors -update", path)
			}
		})
	}
}

// TestReadBack reads the files as anybody else would, and gives the octets in them to
// our decoders.
func TestReadBack(t *testing.T) {
	all := files()
	paths, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil {
		t.Fatal(err)
	}
	if len(paths) != len(all) {
		t.Errorf("%d files in docs/vectors, want %d", len(paths), len(all))
	}
	for _, path := range paths {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var f file
		if err := json.Unmarshal(b, &f); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		ours := all[strings.TrimSuffix(filepath.Base(path), ".json")]
		if len(f.Packets) != len(ours.samples) {
			t.Errorf("%s: %d packets, want %d", path, len(f.Packets), len(ours.samples))
			continue
		}
		for i, p := range f.Packets {
			octets, err := hex.DecodeString(p.Octets)
			if err != nil {
				t.Fatalf("%s: %s: %v", path, p.Name, err)
			}
			ours.samples[i].decodes(t, octets)
		}
	}
}

// TestPython runs docs/vectors/read.py, which shares nothing with us.
func TestPython(t *testing.T) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("python3 is missing")
	}
	read := func(dir string) (string, error) {
		out, err := exec.CommandContext(t.Context(), python, filepath.Join(dir, "read.py")).CombinedOutput()
		return string(out), err
	}
	out, err := read(dir)
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if !strings.Contains(out, "all hold") {
		t.Errorf("read.py says %q, want \"all hold\"", out)
	}
	// It notices one bit.
	broken := t.TempDir()
	if err := os.CopyFS(broken, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string][2]string{
		"service-id.json": {`"octets": "01`, `"octets": "03`},
		"crossing.json":   {`"verdict":"accept"`, `"verdict":"reject"`},
		"mpa.json":        {`"initiator":{"ird":2,"ord":2},"reply"`, `"initiator":{"ird":2,"ord":3},"reply"`},
	} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		worse := bytes.Replace(b, []byte(change[0]), []byte(change[1]), 1)
		if bytes.Equal(worse, b) {
			t.Errorf("%s has no %s", name, change[0])
		}
		if err := os.WriteFile(filepath.Join(broken, name), worse, 0o644); err != nil {
			t.Fatal(err)
		}
		if out, err := read(broken); err == nil {
			t.Errorf("%s was changed, and read.py says %q", name, out)
		}
		if err := os.WriteFile(filepath.Join(broken, name), b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// check holds our codec to a sample.
func (s *sample) check(t *testing.T) {
	t.Helper()
	octets := s.octets()
	if s.encode != nil {
		got, err := s.encode()
		if err != nil {
			t.Errorf("%s: %v", s.name, err)
		}
		if !bytes.Equal(got, octets) {
			t.Errorf("%s: encoded, and packed from its fields\n%x\n%x", s.name, got, octets)
		}
	}
	s.decodes(t, octets)
}

// decodes fails if our decoder does not find in octets what the sample is made of.
func (s *sample) decodes(t *testing.T, octets []byte) {
	t.Helper()
	got, err := s.decode(octets)
	if err != nil {
		t.Errorf("%s: %v", s.name, err)
	}
	if !reflect.DeepEqual(got, s.want) {
		t.Errorf("%s: decoded\n got %+v\nwant %+v", s.name, got, s.want)
	}
}

// check fails if our code decides otherwise.
func (d *decision) check(t *testing.T) {
	t.Helper()
	if got := d.decide(); !reflect.DeepEqual(got, d.Want) {
		t.Errorf("%s: decided\n got %v\nwant %v", d.Name, got, d.Want)
	}
}
