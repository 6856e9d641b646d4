// Command guestd is the last program that init starts in a guest. The host sends it
// commands over a virtual serial port. guestd runs them, several at a time, and powers
// the machine off when the host has gone.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"ipoibcm/test/interop/guest"
)

func main() {
	err := serve()
	fmt.Println("guestd:", err)
	syscall.Sync()
	syscall.Reboot(syscall.LINUX_REBOOT_CMD_POWER_OFF)
}

// A server is the guest's end of the virtual serial port.
type server struct {
	mu   sync.Mutex // of out
	out  io.Writer
	jobs map[int]*job
}

type job struct {
	cmd   *exec.Cmd
	stdin io.WriteCloser
}

func serve() error {
	f, err := open()
	if err != nil {
		return err
	}
	defer f.Close()
	s := &server{out: f, jobs: map[int]*job{}}
	s.send(guest.FromGuest{})
	in := bufio.NewReader(f)
	for {
		line, err := in.ReadBytes('\n')
		if err != nil {
			return fmt.Errorf("the host has gone: %w", err)
		}
		var m guest.ToGuest
		if err := json.Unmarshal(line, &m); err != nil {
			return fmt.Errorf("not understood: %w: %q", err, line)
		}
		s.do(m)
	}
}

// open opens the virtual serial port, which it finds by its name.
func open() (*os.File, error) {
	for range 200 {
		names, _ := filepath.Glob("/sys/class/virtio-ports/*/name")
		for _, n := range names {
			if b, err := os.ReadFile(n); err == nil && strings.TrimSpace(string(b)) == guest.Port {
				return os.OpenFile("/dev/"+filepath.Base(filepath.Dir(n)), os.O_RDWR, 0)
			}
		}
		time.Sleep(10 * time.Millisecond)
	}
	return nil, errors.New("no port to the host")
}

func (s *server) send(m guest.FromGuest) {
	b, _ := json.Marshal(m)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.out.Write(append(b, '\n'))
}

func (s *server) do(m guest.ToGuest) {
	j := s.jobs[m.ID]
	switch {
	case m.Op == "start" && j == nil && len(m.Argv) > 0:
		s.start(m)
	case j == nil:
	case m.Op == "stdin":
		j.stdin.Write(m.Data)
	case m.Op == "eof":
		j.stdin.Close()
	case m.Op == "kill":
		syscall.Kill(-j.cmd.Process.Pid, syscall.SIGKILL)
	}
}

func (s *server) start(m guest.ToGuest) {
	c := exec.Command(m.Argv[0], m.Argv[1:]...)
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c.WaitDelay = time.Second // a grandchild may keep the pipe
	w := writer{s, m.ID}
	c.Stdout, c.Stderr = w, w
	stdin, err := c.StdinPipe()
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		w.Write([]byte(err.Error() + "\n"))
		s.send(guest.FromGuest{ID: m.ID, Done: true, Exit: 127})
		return
	}
	s.jobs[m.ID] = &job{c, stdin}
	go func() {
		c.Wait()
		exit := c.ProcessState.ExitCode()
		if st, ok := c.ProcessState.Sys().(syscall.WaitStatus); ok && st.Signaled() {
			exit = 128 + int(st.Signal())
		}
		s.send(guest.FromGuest{ID: m.ID, Done: true, Exit: exit})
	}()
}

// A writer sends the output of one command.
type writer struct {
	s  *server
	id int
}

func (w writer) Write(b []byte) (int, error) {
	for rest := b; len(rest) > 0; {
		n := min(len(rest), 16<<10)
		w.s.send(guest.FromGuest{ID: w.id, Out: rest[:n]})
		rest = rest[n:]
	}
	return len(b), nil
}
