// Package vm runs Debian's kernel in QEMU, as a foreign peer. It makes an image from
// Debian's kernel package and programs of the host, and keeps it in a cache. Guests boot
// from the image without privilege. An Ethernet segment in this process joins them to
// host namespaces.
package vm

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/test/interop/guest"
)

// Bounds.
const (
	// bootTimeout bounds the wait for a guest to boot. Booting takes some 20 s of a processor,
	// which other programs may want too.
	bootTimeout = 4 * time.Minute
	// lifetime is how many seconds a guest runs at most, should nobody end it.
	lifetime  = "1200"
	maxOutput = 4 << 20 // octets kept of one command
)

// A Config says how a guest is made.
type Config struct {
	Name    string
	Segment *Segment
	MAC     net.HardwareAddr
	MTU     int    // of eth0
	IPv4    string // address and prefix length of eth0
	Modules []string
	NoRXE   bool // do not make rxe0
	Memory  int  // MiB; zero means 512
}

// A VM is a running guest.
type VM struct {
	Name    string
	cmd     *exec.Cmd
	ctl     net.Conn
	out     sync.Mutex // guards writes to ctl, and mon and answers
	mon     net.Conn   // to QEMU's monitor
	answers *json.Decoder
	cons    buffer

	mu     sync.Mutex
	procs  map[int]*Proc
	lastID int
	ready  chan struct{} // closed when guestd is ready
	gone   chan struct{} // closed when QEMU has ended
}

// Boot starts a guest and returns when guestd in it accepts commands.
func Boot(ctx context.Context, img *Image, c Config) (*VM, error) {
	netGuest, netHost, err := pair()
	if err != nil {
		return nil, err
	}
	defer netGuest.Close()
	ctlGuest, ctlHost, err := pair()
	if err != nil {
		netHost.Close()
		return nil, err
	}
	defer ctlGuest.Close()
	monGuest, monHost, err := pair()
	if err != nil {
		return nil, errors.Join(err, netHost.Close(), ctlHost.Close())
	}
	defer monGuest.Close()
	v := &VM{Name: c.Name, ctl: ctlHost, mon: monHost, procs: map[int]*Proc{}, ready: make(chan struct{}),
		gone: make(chan struct{})}
	rxe := 1
	if c.NoRXE {
		rxe = 0
	}
	v.cmd = exec.Command("timeout", "-k", "1", lifetime, "qemu-system-x86_64", "-M", "pc", "-accel",
		"tcg,thread=multi,tb-size=256", "-cpu", "max",
		"-m", fmt.Sprint(cmp.Or(c.Memory, 512)), "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-kernel", img.Kernel, "-initrd", img.Initrd,
		// The clock's rate is given because measuring it in emulation fails now and then.
		"-append",
		fmt.Sprintf("console=ttyS0 quiet panic=-1 mitigations=off no_timer_check tsc_early_khz=2600000 lpj=10400000 "+
			"guest.ip4=%s guest.mtu=%d guest.mods=%s guest.rxe=%d", c.IPv4, c.MTU, strings.Join(c.Modules, ","), rxe),
		"-serial", "file:/dev/fd/1", "-chardev", "socket,id=mon,fd=5", "-mon", "chardev=mon,mode=control",
		"-netdev", "socket,id=n0,fd=3", "-device", fmt.Sprintf("virtio-net-pci,netdev=n0,mac=%s,host_mtu=9000", c.MAC),
		"-chardev", "socket,id=ctl,fd=4", "-device", "virtio-serial-pci", "-device",
		"virtserialport,chardev=ctl,name="+guest.Port)
	v.cmd.ExtraFiles = []*os.File{netGuest, ctlGuest, monGuest}
	v.cmd.Stdout, v.cmd.Stderr = &v.cons, &v.cons
	v.cmd.WaitDelay = time.Second
	if err := v.cmd.Start(); err != nil {
		return nil, errors.Join(err, netHost.Close(), ctlHost.Close(), monHost.Close())
	}
	c.Segment.addStream(c.Name, netHost)
	go func() {
		v.cmd.Wait()
		close(v.gone)
		ctlHost.Close()
		monHost.Close()
	}()
	go v.listen()
	ctx, cancel := context.WithTimeout(ctx, bootTimeout)
	defer cancel()
	select {
	case <-v.ready:
		return v, nil
	case <-v.gone:
		err = errors.New("QEMU ended")
	case <-ctx.Done():
		err = fmt.Errorf("no sign of life: %w", ctx.Err())
	}
	v.Kill()
	return nil, fmt.Errorf("guest %s: %w\n%s", c.Name, err, v.Console())
}

// pair returns two connected sockets: a file for QEMU, and ours.
func pair() (*os.File, net.Conn, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	theirs, ours := os.NewFile(uintptr(fds[0]), "guest"), os.NewFile(uintptr(fds[1]), "host")
	defer ours.Close()
	c, err := net.FileConn(ours)
	if err != nil {
		theirs.Close()
		return nil, nil, err
	}
	return theirs, c, nil
}

// Console returns what the guest's kernel and init have printed.
func (v *VM) Console() string { return v.cons.String() }

// Kill ends the guest as a power failure would.
func (v *VM) Kill() {
	// The signal is sent to the program timeout, which passes it on to QEMU.
	v.cmd.Process.Signal(unix.SIGTERM)
	select {
	case <-v.gone:
	case <-time.After(3 * time.Second):
		v.cmd.Process.Kill()
		<-v.gone
	}
}

// listen handles the messages of guestd until the guest is gone.
func (v *VM) listen() {
	in := bufio.NewReader(v.ctl)
	for {
		line, err := in.ReadBytes('\n')
		if err != nil {
			break
		}
		var m guest.FromGuest
		if json.Unmarshal(line, &m) != nil {
			continue
		}
		v.mu.Lock()
		p := v.procs[m.ID]
		v.mu.Unlock()
		switch {
		case m.ID == 0:
			close(v.ready)
		case p != nil && m.Done:
			p.end(m.Exit, nil)
		case p != nil:
			p.add(m.Out)
		}
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, p := range v.procs {
		p.end(-1, errors.New("the guest is gone"))
	}
}

func (v *VM) send(m guest.ToGuest) error {
	b, _ := json.Marshal(m)
	v.out.Lock()
	defer v.out.Unlock()
	_, err := v.ctl.Write(append(b, '\n'))
	return err
}

// A Proc is a command in a guest.
type Proc struct {
	vm *VM
	id int
	// Command is what was started, for messages.
	Command string

	mu   sync.Mutex
	out  []byte // output not yet read by Line
	all  []byte // output, at most about maxOutput octets
	done bool
	exit int
	err  error
	more chan struct{} // closed and replaced at every change
}

// Start starts a command.
func (v *VM) Start(argv ...string) (*Proc, error) {
	v.mu.Lock()
	v.lastID++
	p := &Proc{vm: v, id: v.lastID, Command: strings.Join(argv, " "), more: make(chan struct{})}
	v.procs[p.id] = p
	v.mu.Unlock()
	if err := v.send(guest.ToGuest{Op: "start", ID: p.id, Argv: argv}); err != nil {
		return nil, fmt.Errorf("start %s in %s: %w", p.Command, v.Name, err)
	}
	return p, nil
}

// Run runs a command to its end and returns its output. It is an error if it
// fails or takes longer than timeout.
func (v *VM) Run(timeout time.Duration, argv ...string) (string, error) {
	p, err := v.Start(argv...)
	if err != nil {
		return "", err
	}
	return p.Wait(timeout)
}

// Sh runs a line of shell as [VM.Run] runs a command.
func (v *VM) Sh(timeout time.Duration, line string) (string, error) {
	return v.Run(timeout, "/bin/sh", "-c", line)
}

func (p *Proc) change(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
	close(p.more)
	p.more = make(chan struct{})
}

func (p *Proc) add(b []byte) {
	p.change(func() {
		if len(p.all) < maxOutput {
			p.out, p.all = append(p.out, b...), append(p.all, b...)
		}
	})
}

func (p *Proc) end(exit int, err error) {
	p.change(func() {
		if !p.done {
			p.done, p.exit, p.err = true, exit, err
		}
	})
}

// ErrTimeout says that a command took too long.
var ErrTimeout = errors.New("timed out")

// wait returns when ok returns true, or an error after timeout. It holds the lock while it calls ok.
func (p *Proc) wait(timeout time.Duration, ok func() bool) error {
	t := time.NewTimer(timeout)
	defer t.Stop()
	for {
		p.mu.Lock()
		yes, more := ok(), p.more
		p.mu.Unlock()
		if yes {
			return nil
		}
		select {
		case <-more:
		case <-t.C:
			return fmt.Errorf("%s in %s: %w after %v; it has printed:\n%s", p.Command, p.vm.Name, ErrTimeout,
				timeout, p.Output())
		}
	}
}

// Wait waits for the end of the command and returns its output. After timeout it kills
// the command and returns an error too.
func (p *Proc) Wait(timeout time.Duration) (string, error) {
	if err := p.wait(timeout, func() bool { return p.done }); err != nil {
		p.Kill()
		return p.Output(), err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.err != nil:
		return string(p.all), fmt.Errorf("%s in %s: %w", p.Command, p.vm.Name, p.err)
	case p.exit != 0:
		return string(p.all), fmt.Errorf("%s in %s: exit status %d:\n%s", p.Command, p.vm.Name, p.exit, p.all)
	}
	return string(p.all), nil
}

// Line waits for the next line of output and returns it. If the command ends without another line, it returns
// an error.
func (p *Proc) Line(timeout time.Duration) (line string, err error) {
	ended := false
	err = p.wait(timeout, func() bool {
		if i := bytes.IndexByte(p.out, '\n'); i >= 0 {
			line, p.out = string(p.out[:i]), p.out[i+1:]
			return true
		}
		ended = p.done
		return ended
	})
	if err == nil && ended {
		return "", fmt.Errorf("%s in %s has ended:\n%s", p.Command, p.vm.Name, p.Output())
	}
	return line, err
}

// Output returns what the command has printed.
func (p *Proc) Output() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return string(p.all)
}

// Write writes to the command's standard input.
func (p *Proc) Write(b []byte) (int, error) {
	if err := p.vm.send(guest.ToGuest{Op: "stdin", ID: p.id, Data: b}); err != nil {
		return 0, err
	}
	return len(b), nil
}

// CloseInput ends the command's standard input.
func (p *Proc) CloseInput() error { return p.vm.send(guest.ToGuest{Op: "eof", ID: p.id}) }

// Kill kills the command and the processes of its process group.
func (p *Proc) Kill() { _ = p.vm.send(guest.ToGuest{Op: "kill", ID: p.id}) }

// A buffer is a bytes.Buffer for several goroutines.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.b.Len() > maxOutput {
		return len(p), nil
	}
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}
