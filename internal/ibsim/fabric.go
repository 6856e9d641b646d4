package ibsim

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// preload matches the library that makes programs of libibumad use the simulator.
const preload = "/usr/lib/*/umad2sim/libumad2sim.so"

// topology has two switches and four hosts. opensm runs at hostA. The port GUID of a host
// is its node GUID plus 1.
const topology = `vendid=0x2c9
devid=0x1017
caguid=0x0002c90000a00000
Hca	1 "hostA"
[1]	"sw1"[1]

vendid=0x2c9
devid=0x1017
caguid=0x0002c90000b00000
Hca	1 "hostB"
[1]	"sw1"[2]

vendid=0x2c9
devid=0x1017
caguid=0x0002c90000c00000
Hca	1 "hostC"
[1]	"sw2"[1]

vendid=0x2c9
devid=0x1017
caguid=0x0002c90000d00000
Hca	1 "hostD"
[1]	"sw2"[2]

switchguid=0x0002c90000010000
Switch	8 "sw1"
[1]	"hostA"[1]
[2]	"hostB"[1]
[7]	"sw2"[7]

switchguid=0x0002c90000020000
Switch	8 "sw2"
[1]	"hostC"[1]
[2]	"hostD"[1]
[7]	"sw1"[7]
`

// patience bounds the wait for a program's line in its log. "SUBNET UP" comes in less than a second on
// an idle machine.
const patience = 30 * time.Second

// A Fabric is one simulator and its subnet manager.
type Fabric struct {
	name, dir string
	console   io.WriteCloser
	ibsim     *program
	opensm    *program
	sms       int // started so far
}

var fabrics atomic.Uint32

// Missing returns an error that names the first program or library that is not installed, or nil if all
// are.
func Missing() error {
	for _, name := range []string{"opensm", "ibsim"} {
		if _, err := find(name); err != nil {
			return fmt.Errorf("%s is not installed (Debian: opensm, ibsim-utils)", name)
		}
	}
	if libs, _ := filepath.Glob(preload); len(libs) == 0 {
		return errors.New("libumad2sim.so is not installed (Debian: libumad2sim0)")
	}
	return nil
}

// find looks for a program in /usr/sbin and /sbin, then in PATH.
func find(name string) (string, error) {
	for _, dir := range []string{"/usr/sbin/", "/sbin/"} {
		if _, err := os.Stat(dir + name); err == nil {
			return dir + name, nil
		}
	}
	return exec.LookPath(name)
}

// Start starts a simulator, and a subnet manager with the text partitions as its
// partitions.conf. If the text is empty, opensm has no such file. Both programs end with
// the test.
func Start(t testing.TB, partitions string) *Fabric {
	t.Helper()
	f := &Fabric{name: fmt.Sprintf("ipoibcm-%d-%d", os.Getpid(), fabrics.Add(1)), dir: t.TempDir()}
	if err := f.start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		f.StopSM()
		f.console.Close()
		f.ibsim.stop()
	})
	if err := f.StartSM(partitions); err != nil {
		t.Fatal(err)
	}
	return f
}

func (f *Fabric) start() error {
	file := filepath.Join(f.dir, "net")
	if err := os.WriteFile(file, []byte(topology), 0o600); err != nil {
		return err
	}
	path, err := find("ibsim")
	if err != nil {
		return err
	}
	c := f.command(path, "-s", file)
	if f.console, err = c.StdinPipe(); err != nil {
		return err
	}
	f.ibsim, err = run(c, filepath.Join(f.dir, "ibsim.log"))
	if err != nil {
		return err
	}
	return f.ibsim.wait("simulator ready")
}

// command returns a command in the simulator's directory, with the name of the simulator's sockets in
// its environment.
func (f *Fabric) command(path string, args ...string) *exec.Cmd {
	c := exec.Command(path, args...)
	c.Dir = f.dir
	c.Env = append(os.Environ(), "IBSIM_SOCKNAME="+f.name)
	return c
}

// StartSM starts the subnet manager, with partitions as for [Start], and returns when the subnet is up.
func (f *Fabric) StartSM(partitions string) error {
	f.sms++
	conf := filepath.Join(f.dir, "opensm.conf")
	if err := os.WriteFile(conf, []byte("force_log_flush TRUE\nsweep_interval 0\n"), 0o600); err != nil {
		return err
	}
	parts := filepath.Join(f.dir, fmt.Sprintf("partitions-%d", f.sms)) // does not exist if empty
	if partitions != "" {
		if err := os.WriteFile(parts, []byte(partitions), 0o600); err != nil {
			return err
		}
	}
	path, err := find("opensm")
	if err != nil {
		return err
	}
	libs, _ := filepath.Glob(preload)
	log := filepath.Join(f.dir, fmt.Sprintf("opensm-%d.log", f.sms))
	c := f.command(path, "-F", conf, "-e", "-f", log, "-P", parts)
	c.Env = append(c.Env, "LD_PRELOAD="+strings.Join(libs, ":"), "SIM_HOST=hostA",
		"OSM_CACHE_DIR="+f.dir, "OSM_TMP_DIR="+f.dir)
	if f.opensm, err = run(c, log+".out"); err != nil {
		return err
	}
	f.opensm.log = log
	return f.opensm.wait("SUBNET UP")
}

// StopSM ends the subnet manager.
func (f *Fabric) StopSM() {
	if f.opensm != nil {
		f.opensm.stop()
		f.opensm = nil
	}
}

// SetLink takes the link of a host down, or up again.
func (f *Fabric) SetLink(node string, up bool) error {
	word := "Unlink"
	if up {
		word = "ReLink"
	}
	_, err := fmt.Fprintf(f.console, "%s \"%s\"[1]\n", word, node)
	return err
}

// A program is a running program.
type program struct {
	cmd  *exec.Cmd
	out  *os.File
	log  string // file that wait reads
	done chan struct{}
}

func run(c *exec.Cmd, out string) (*program, error) {
	file, err := os.Create(out)
	if err != nil {
		return nil, err
	}
	c.Stdout, c.Stderr = file, file
	if err := c.Start(); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	p := &program{cmd: c, out: file, log: out, done: make(chan struct{})}
	go func() {
		c.Wait()
		close(p.done)
	}()
	return p, nil
}

// wait waits until the log has text.
func (p *program) wait(text string) error {
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		b, _ := os.ReadFile(p.log)
		if bytes.Contains(b, []byte(text)) {
			return nil
		}
		select {
		case <-p.done:
			return fmt.Errorf("%s ended: %v\n%s", p.cmd.Path, p.cmd.ProcessState, b)
		default:
		}
	}
	return fmt.Errorf("%s: no %q within %v", p.cmd.Path, text, patience)
}

// stop ends p and waits for that.
func (p *program) stop() {
	p.cmd.Process.Signal(os.Interrupt)
	select {
	case <-p.done:
	case <-time.After(3 * time.Second):
		p.cmd.Process.Kill()
		<-p.done
	}
	p.out.Close()
}
