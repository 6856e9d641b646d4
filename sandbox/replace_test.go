package sandbox

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// A replacement is a file that is replaced while a sandbox is in force.
type replacement struct {
	Options Options
	Path    string // what is read
	Target  string // where Path leads as a link; empty: Path is the file
}

// readReplaced enters the sandbox with file systems of its own, prints whether Landlock is on, and for each
// line of the input what it reads from the file then.
func readReplaced() {
	var r replacement
	if err := json.Unmarshal([]byte(os.Getenv(replaced+"_FILE")), &r); err != nil {
		panic(err)
	}
	for _, dir := range []string{"/etc", "/run", "/srv"} {
		if err := unix.Mount("none", dir, "tmpfs", 0, ""); err != nil {
			panic(err)
		}
	}
	file := r.Path
	if r.Target != "" {
		file = r.Target
	}
	for _, err := range []error{os.MkdirAll(filepath.Dir(r.Path), 0o755), os.MkdirAll(filepath.Dir(file), 0o755),
		os.WriteFile(file, []byte("old"), 0o644)} {
		if err != nil {
			panic(err)
		}
	}
	if r.Target != "" {
		if err := os.Symlink(r.Target, r.Path); err != nil {
			panic(err)
		}
	}
	parts, err := Enter(r.Options)
	if err != nil {
		panic(err)
	}
	fmt.Println(on(result{Parts: parts}, "landlock"))
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		text, err := os.ReadFile(r.Path)
		fmt.Println(string(text) + errorText(err))
	}
}

// A file that another one replaces by a rename, as programs do that write settings, is read again. So is one
// that a link leads to.
func TestReplacedFiles(t *testing.T) {
	needRoot(t)
	const conf, stub = "/etc/resolv.conf", "/run/systemd/resolve/stub-resolv.conf"
	for _, tt := range []struct {
		name         string
		names        bool
		files        []string
		path, target string
		relink       string // what the link leads to afterwards, instead; empty: what it did
		want         string
	}{
		{"the resolver's", true, nil, conf, "", "", "new"},
		{"the resolver's, a link", true, nil, conf, stub, "", "new"},
		{"the resolver's, without names", false, nil, conf, "", "", "permission denied"},
		{"another file of that folder, without names", false, nil, "/etc/shadow", "", "", "permission denied"},
		{"settings", false, []string{"/srv/a.yaml"}, "/srv/a.yaml", "", "", "new"},
		{"settings, a link", false, []string{"/etc/ipoibcm/a.yaml"}, "/etc/ipoibcm/a.yaml", "/srv/config/a.yaml", "", "new"},
		{"a certificate, a link to another one", false, []string{"/etc/live/cert.pem"}, "/etc/live/cert.pem",
			"/srv/archive/cert1.pem", "/srv/archive/cert2.pem", "new"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := newReplaced(t, replacement{Path: tt.path, Target: tt.target,
				Options: Options{NoSeccomp: "not in this test", Names: tt.names, ReadFiles: tt.files}})
			if c.line() != "true" {
				t.Skip("this kernel has no Landlock")
			}
			file := tt.path
			if tt.target != "" {
				file = tt.target
			}
			if tt.relink != "" {
				c.write(tt.relink)
				if err := os.Symlink(tt.relink, c.root+tt.path+".new"); err != nil {
					t.Fatal(err)
				}
				file = tt.path
			} else {
				c.write(file + ".new")
			}
			if err := os.Rename(c.root+file+".new", c.root+file); err != nil {
				t.Fatal(err)
			}
			fmt.Fprintln(c.in)
			if got := c.line(); !strings.HasSuffix(got, tt.want) {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

// A replacedChild is a process that runs readReplaced.
type replacedChild struct {
	*testing.T
	in   io.WriteCloser
	out  *bufio.Scanner
	root string // its root directory, as this process sees it
}

func newReplaced(t *testing.T, r replacement) *replacedChild {
	t.Helper()
	b, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(exe)
	c.Env = append(os.Environ(), inChild+"="+replaced, replaced+"_FILE="+string(b))
	c.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	c.Stderr = os.Stderr
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Skipf("cannot make a mount namespace: %v", err)
	}
	t.Cleanup(func() {
		in.Close()
		if err := c.Wait(); err != nil {
			t.Error(err)
		}
	})
	return &replacedChild{T: t, in: in, out: bufio.NewScanner(out), root: fmt.Sprintf("/proc/%d/root", c.Process.Pid)}
}

func (c *replacedChild) line() string {
	c.Helper()
	if !c.out.Scan() {
		c.Fatalf("the child says nothing: %v", c.out.Err())
	}
	return c.out.Text()
}

func (c *replacedChild) write(path string) {
	c.Helper()
	if err := os.WriteFile(c.root+path, []byte("new"), 0o644); err != nil {
		c.Fatal(err)
	}
}
