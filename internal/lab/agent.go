package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"ipoibcm/control"
)

// An Agent is one "ipoibcmd run" process in a host.
type Agent struct {
	Host    *Host
	Control string // its control socket

	cmd   *exec.Cmd
	stdin io.Closer
	log   *os.File
	done  chan struct{}
	err   error // of the process; valid once done is closed
	http  http.Client
}

// An AgentConfig says how to start an agent.
type AgentConfig struct {
	Program string   // the ipoibcmd binary
	Control string   // control socket
	Log     string   // file that its log is appended to
	Args    []string // more arguments of run
	Stderr  *os.File // takes the agent's standard error; nil means Log
	Env     []string // more variables of the agent's environment
	// Files are handed to the agent under FileNames, as a service manager does (sd_listen_fds(3)), and are
	// closed here.
	Files     []*os.File
	FileNames []string
	// Detached lets the agent outlive this process. Otherwise the agent ends when
	// this process does, however that ends.
	Detached bool
}

// StartAgent starts an agent inside the host and returns once its interface is up.
func StartAgent(ctx context.Context, h *Host, c AgentConfig) (*Agent, error) {
	logFile, err := os.OpenFile(c.Log, os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	a := &Agent{Host: h, Control: c.Control, log: logFile, done: make(chan struct{})}
	a.http.Transport = &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", c.Control)
		}}
	a.cmd = exec.Command(c.Program, append([]string{"run", "--control", c.Control}, c.Args...)...)
	if len(c.Files) > 0 { // LISTEN_PID is known only when the process is there: the shell sets it
		a.cmd.Args = append([]string{"sh", "-c", `LISTEN_PID=$$ exec "$0" "$@"`, c.Program}, a.cmd.Args[1:]...)
		a.cmd.Path, a.cmd.ExtraFiles = "/bin/sh", c.Files
		c.Env = append(c.Env, fmt.Sprintf("LISTEN_FDS=%d", len(c.Files)), "LISTEN_FDNAMES="+strings.Join(c.FileNames, ":"))
	}
	a.cmd.Stdout, a.cmd.Stderr = logFile, logFile
	if c.Stderr != nil {
		a.cmd.Stderr = c.Stderr
	}
	a.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is ours to hand on
	a.cmd.Env = append(os.Environ(), c.Env...)
	if !c.Detached {
		a.cmd.Args = append(a.cmd.Args, "--exit-on-eof")
		if a.stdin, err = a.cmd.StdinPipe(); err != nil {
			return nil, errors.Join(err, logFile.Close())
		}
	}
	err = h.Start(a.cmd)
	for _, f := range c.Files {
		f.Close()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start agent in %s: %w", h.Name, err), logFile.Close())
	}
	go func() {
		a.err = a.cmd.Wait()
		close(a.done)
	}()
	if err := a.waitUp(ctx); err != nil {
		stacks := a.stacks()
		a.Kill()
		return nil, fmt.Errorf("agent in %s: %w\n%s%s", h.Name, err, stacks, a.LogTail(200))
	}
	return a, nil
}

// patience bounds the wait for an event that takes milliseconds on an idle machine.
const patience = time.Minute

func (a *Agent) waitUp(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		var s control.Status
		err := a.Get(ctx, control.PathStatus, &s)
		if err == nil && s.Interface.State == "up" {
			return nil
		}
		select {
		case <-a.done:
			return fmt.Errorf("it ended by itself: %v", a.err)
		case <-ctx.Done():
			return fmt.Errorf("not up in time (%v)", err)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// stacks returns the kernel stacks of the agent's threads. It ends the agent with SIGQUIT, which writes
// the stacks of the goroutines at the end of its log.
func (a *Agent) stacks() string {
	var out strings.Builder
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stack", a.PID()))
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil {
			fmt.Fprintf(&out, "%s:\n%s", f, b)
		}
	}
	if a.cmd.Process.Signal(syscall.SIGQUIT) == nil {
		select {
		case <-a.done:
		case <-time.After(2 * time.Second):
		}
	}
	return out.String()
}

// Done is closed when the process has ended.
func (a *Agent) Done() <-chan struct{} { return a.done }

// PID returns the process ID.
func (a *Agent) PID() int { return a.cmd.Process.Pid }

// Get reads one document of the control API.
func (a *Agent) Get(ctx context.Context, path string, v any) error {
	body, err := a.Stream(ctx, path)
	if err != nil {
		return err
	}
	defer body.Close()
	return json.NewDecoder(body).Decode(v)
}

// Stream opens an answer of the control API, which may be endless. The caller closes it.
func (a *Agent) Stream(ctx context.Context, path string) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://agent"+path, nil)
	if err != nil {
		return nil, err
	}
	resp, err := a.http.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		defer resp.Body.Close()
		var e control.Error
		json.NewDecoder(resp.Body).Decode(&e)
		return nil, fmt.Errorf("%s: %s (%s)", path, e.Error, resp.Status)
	}
	return resp.Body, nil
}

// Status returns the agent's status.
func (a *Agent) Status(ctx context.Context) (s control.Status, err error) {
	err = a.Get(ctx, control.PathStatus, &s)
	return s, err
}

// Conns returns the established connections.
func (a *Agent) Conns(ctx context.Context) ([]control.Conn, error) {
	var d control.Conns
	if err := a.Get(ctx, control.PathConns, &d); err != nil {
		return nil, err
	}
	var up []control.Conn
	for _, c := range d.Conns {
		if c.State == Established {
			up = append(up, c)
		}
	}
	return up, nil
}

// Established is the state of a connection that carries packets.
const Established = "ESTABLISHED"

// Counter returns the counter name of part. It is an error if there is no such counter.
func (a *Agent) Counter(ctx context.Context, part, name string) (uint64, error) {
	var d control.Stats
	if err := a.Get(ctx, control.PathStats, &d); err != nil {
		return 0, err
	}
	for _, c := range d.Counters {
		if c.Part == part && c.Name == name {
			return c.Value, nil
		}
	}
	return 0, fmt.Errorf("agent in %s has no counter %s of %s", a.Host.Name, name, part)
}

// WaitConns waits until ok holds for the established connections, and returns them. After timeout it
// returns an error.
func (a *Agent) WaitConns(ctx context.Context, timeout time.Duration,
	ok func([]control.Conn) bool) (conns []control.Conn, err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for {
		if conns, err = a.Conns(ctx); err == nil && ok(conns) {
			return conns, nil
		}
		select {
		case <-ctx.Done():
			return conns, fmt.Errorf("after %v agent in %s has %d connections (%v)", timeout, a.Host.Name, len(conns), err)
		case <-a.done:
			return nil, fmt.Errorf("the agent in %s has ended: %v", a.Host.Name, a.err)
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// Stop asks the agent to end (SIGTERM) and returns its error. After timeout it kills the agent.
func (a *Agent) Stop(timeout time.Duration) error {
	a.cmd.Process.Signal(syscall.SIGTERM)
	if err := a.await("stop", timeout); err != nil || a.err == nil {
		return err
	}
	return fmt.Errorf("agent in %s: %w\n%s", a.Host.Name, a.err, a.LogTail(10))
}

// Wait waits until the agent ends by itself and returns its error. After timeout it
// kills the agent.
func (a *Agent) Wait(timeout time.Duration) error {
	if err := a.await("end", timeout); err != nil {
		return err
	}
	return a.err
}

// await waits until the process has ended. After timeout it kills the agent.
func (a *Agent) await(what string, timeout time.Duration) error {
	select {
	case <-a.done:
		a.release()
		return nil
	case <-time.After(timeout):
		a.Kill()
		return fmt.Errorf("agent in %s did not %s in %v", a.Host.Name, what, timeout)
	}
}

// Kill ends the agent with SIGKILL.
func (a *Agent) Kill() {
	a.cmd.Process.Kill()
	<-a.done
	a.release()
}

func (a *Agent) release() {
	if a.stdin != nil {
		a.stdin.Close()
	}
	a.log.Close()
	a.http.CloseIdleConnections()
}

// LogTail returns the last n lines of the agent's log.
func (a *Agent) LogTail(n int) string {
	b, err := os.ReadFile(a.log.Name())
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimRight(string(b), "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
