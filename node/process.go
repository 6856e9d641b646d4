package node

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/control"
	"ipoibcm/membership"
)

// A process identifies the process of an agent; the zero value is none. The kernel gives a PID to another
// process one day, but never with the same start time.
type process struct {
	PID   int    `json:"pid,omitempty"`
	Began string `json:"began,omitempty"` // in clock ticks since the system was started
}

// beganAt returns when a process began, as /proc/PID/stat has it. It is empty if there is no such process,
// or if the process has ended and nobody has waited for it yet.
func beganAt(pid int) string {
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return ""
	}
	// Field 22 of proc(5); the second is a name in parentheses, which may have blanks.
	_, rest, _ := strings.Cut(string(text[max(0, bytes.LastIndexByte(text, ')')):]), " ")
	fields := strings.Fields(rest)
	if len(fields) < 20 || fields[0] == "Z" {
		return ""
	}
	return fields[19]
}

// alive reports whether the process still runs.
func (p process) alive() bool { return p.PID != 0 && beganAt(p.PID) == p.Began }

// end sends the process SIGTERM, at which it says goodbye to its peers. If it has not ended after patience,
// end kills it. The process need not be our child.
func (p process) end(patience time.Duration) error {
	if p.PID == 0 {
		return nil
	}
	fd, err := unix.PidfdOpen(p.PID, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if !p.alive() {
		return nil // another process has the PID
	}
	for _, sig := range []unix.Signal{unix.SIGTERM, unix.SIGKILL} {
		if err := unix.PidfdSendSignal(fd, sig, nil, 0); errors.Is(err, unix.ESRCH) {
			return nil
		} else if err != nil {
			return err
		}
		if ended, err := pollEnd(fd, patience); ended || err != nil {
			return err
		}
	}
	return fmt.Errorf("process %d does not end", p.PID)
}

// pollEnd waits for the end of a process, and reports whether it came within patience.
func pollEnd(pidfd int, patience time.Duration) (bool, error) {
	for until := time.Now().Add(patience); ; {
		left := max(0, time.Until(until))
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, int(left.Milliseconds()))
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return false, err
		case n > 0:
			return true, nil
		case left == 0:
			return false, nil
		}
	}
}

// settings is an agent's configuration file: YAML, of which JSON is a part.
type settings struct {
	Underlay   string         `json:"underlay"`
	Name       string         `json:"name"`
	Netns      string         `json:"netns"`
	Control    string         `json:"control"`
	Addresses  []netip.Prefix `json:"addresses"`
	Mode       string         `json:"mode,omitempty"`
	UDMTU      int            `json:"ud_mtu,omitempty"`
	ReceiveMTU int            `json:"receive_mtu,omitempty"`
	PKey       uint16         `json:"pkey,omitempty"`
	Threads    int            `json:"threads"` // one, because the pods of a node share its processors anyway
	Members
	MemberID string `json:"member_id"`
	StateDir string `json:"state_dir"`
}

// memberID names a pod on its link: by the host's name, for people, and by the pod's id.
func memberID(k Key) string {
	if name, err := os.Hostname(); err == nil && membership.ValidID(name+"."+k.id()) {
		return name + "." + k.id()
	}
	return k.id()
}

// spawn starts a pod's agent, which outlives us. ended is closed when it has ended.
func (s *Service) spawn(p *pod) (proc process, ended <-chan struct{}, err error) {
	text, err := json.Marshal(settings{
		Underlay: p.underlay(), Name: p.IfName, Netns: p.Netns, Control: s.controlPath(p.Key), Addresses: p.Addresses,
		Mode: p.Mode, UDMTU: p.UDMTU, ReceiveMTU: p.ReceiveMTU, PKey: p.PKey, Threads: 1,
		Members: p.Members, MemberID: memberID(p.Key), StateDir: s.membersPath(p.Key),
	})
	if err != nil {
		return process{}, nil, err
	}
	if err := os.WriteFile(s.configPath(p.Key), text, 0o600); err != nil {
		return process{}, nil, err
	}
	c := exec.Command(s.opt.Program, "run", "--config", s.configPath(p.Key))
	c.Stderr = os.Stderr
	c.Env = unmanaged(os.Environ())
	c.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // signals of our terminal do not reach the agent
	if err := c.Start(); err != nil {
		return process{}, nil, err
	}
	done := make(chan struct{})
	go func() { // until the process ends, which may be after us
		c.Wait()
		close(done)
		s.wake()
	}()
	return process{c.Process.Pid, beganAt(c.Process.Pid)}, done, nil
}

// unmanaged returns env without what the service manager has told us, and not our agents (sd_notify(3),
// sd_watchdog_enabled(3), sd_listen_fds(3)).
func unmanaged(env []string) []string {
	return slices.DeleteFunc(env, func(v string) bool {
		return slices.ContainsFunc([]string{"NOTIFY_SOCKET=", "WATCHDOG_", "FDSTORE=", "LISTEN_"},
			func(prefix string) bool { return strings.HasPrefix(v, prefix) })
	})
}

// awaitAgent waits until an agent says that its interface is up.
func awaitAgent(ctx context.Context, socket string, ended <-chan struct{}) error {
	c := clientOf(socket)
	for {
		up, last := agentUp(ctx, &c)
		if up {
			return nil
		}
		select {
		case <-ended:
			return errors.New("the agent ended; its log says why")
		case <-ctx.Done():
			return fmt.Errorf("the agent does not get ready: %w", last)
		case <-time.After(pollEvery):
		}
	}
}

// agentUp asks an agent whether its interface is up.
func agentUp(ctx context.Context, c *http.Client) (bool, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://agent"+control.PathStatus, nil)
	if err != nil {
		return false, err
	}
	resp, err := c.Do(req)
	if err != nil {
		return false, err
	}
	defer resp.Body.Close()
	var st control.Status
	if err := json.NewDecoder(resp.Body).Decode(&st); err != nil {
		return false, err
	}
	if got := st.Interface.State; got != "up" {
		return false, fmt.Errorf("its interface is %s", got)
	}
	return true, nil
}

// ours reports whether the process whose directory below /proc is folder has our user and is in the PID
// namespace here. Without both, we cannot have started it.
func ours(folder, here string) bool {
	var st unix.Stat_t
	if err := unix.Stat(folder, &st); err != nil || st.Uid != uint32(os.Geteuid()) {
		return false
	}
	namespace, err := os.Readlink(filepath.Join(folder, "ns/pid"))
	return err == nil && namespace == here
}

// agentsOf returns the processes that were started with a configuration file in dir. The keys are the paths
// of these files. A service that was killed may not have saved which agents it started. Any process can
// give itself such arguments, so only those of our own user and PID namespace count.
func agentsOf(dir string) map[string]process {
	found := map[string]process{}
	here, _ := os.Readlink("/proc/self/ns/pid")
	paths, _ := filepath.Glob("/proc/[0-9]*/cmdline") // the pattern is good
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil || !ours(filepath.Dir(path), here) {
			continue // it has ended, or is not ours
		}
		args := strings.Split(string(text), "\x00")
		i := slices.Index(args, "--config")
		if i < 0 || i+1 >= len(args) || filepath.Dir(args[i+1]) != filepath.Clean(dir) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err != nil {
			continue
		}
		if p := (process{pid, beganAt(pid)}); p.Began != "" {
			found[args[i+1]] = p
		}
	}
	return found
}
