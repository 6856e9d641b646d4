package gotool

import (
	"archive/zip"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// proxy writes a module with one program, which says what its version is, as a module proxy of files, and has
// the go command use it, with a module cache of its own.
func proxy(t *testing.T, module, version string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	at := filepath.Join(dir, module, "@v")
	if err := os.MkdirAll(at, 0o755); err != nil {
		t.Fatal(err)
	}
	mod := "module " + module + "\n\ngo 1.21\n"
	for name, text := range map[string]string{".info": fmt.Sprintf(`{"Version":%q}`, version), ".mod": mod} {
		if err := os.WriteFile(filepath.Join(at, version+name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	f, err := os.Create(filepath.Join(at, version+".zip"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z := zip.NewWriter(f)
	for name, text := range map[string]string{"go.mod": mod,
		"cmd/hello/main.go": "package main\n\nfunc main() { println(\"" + version + "\") }\n"} {
		w, err := z.Create(module + "@" + version + "/" + name)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprint(w, text)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	// Files of a module cache are read-only, which TempDir could not remove.
	t.Setenv("GOFLAGS", "-modcacherw")
	t.Setenv("GOMODCACHE", t.TempDir())
	t.Setenv("GONOSUMDB", module)
	t.Setenv("GOPROXY", "file://"+dir)
	return dir
}

func TestBuild(t *testing.T) {
	const module, version = "example.org/hello", "v1.2.3"
	proxy(t, module, version)
	p := Program{module, version, "./cmd/hello"}
	first := t.TempDir()
	if p.Built(first) {
		t.Fatal("it is there before it is built")
	}
	path, err := p.Build(t.Context(), first)
	if err != nil {
		t.Fatal(err)
	}
	if want := filepath.Join(first, "hello-v1.2.3", "hello"); path != want {
		t.Errorf("it is %s, want %s", path, want)
	}
	if !p.Built(first) {
		t.Error("it is not there after it was built")
	}
	if out, err := exec.Command(path).CombinedOutput(); err != nil || string(out) != version+"\n" {
		t.Errorf("it says %q (%v), want its version", out, err)
	}

	t.Setenv("GOPROXY", "off")
	if path, err := p.Build(t.Context(), t.TempDir()); err != nil {
		t.Errorf("without a network, with the module in the cache: %v", err)
	} else if _, err := os.Stat(path); err != nil {
		t.Error(err)
	}
	p.Version = "v1.2.4"
	if _, err := p.Build(t.Context(), t.TempDir()); err == nil || !strings.Contains(err.Error(), module+"@v1.2.4") {
		t.Errorf("a version that nobody has: error %v, want one that names it", err)
	}
}

func TestName(t *testing.T) {
	for _, tt := range []struct {
		Program
		want string
	}{
		{Program{"golang.zx2c4.com/wireguard", "v0.0.0", "."}, "wireguard"},
		{Program{"honnef.co/go/tools", "v0.8.2", "./cmd/staticcheck"}, "staticcheck"},
	} {
		if got := tt.Name(); got != tt.want {
			t.Errorf("%+v: name %s, want %s", tt.Program, got, tt.want)
		}
	}
}
