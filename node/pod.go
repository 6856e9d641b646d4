package node

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

// A pod is one attachment with what was made for it.
type pod struct {
	record
	mu   sync.Mutex // held by whoever changes it
	gone bool       // it was detached
	proc process    // the pod's agent; zero if there is none

	failures int       // to start the agent, since it was last seen alive
	again    time.Time // the agent is not started before this time
}

// A record is what is kept of a pod in its file.
type record struct {
	Attachment
	Dev   uint64  `json:"dev"` // with Inode: the network namespace, to which the path may not lead any more
	Inode uint64  `json:"inode"`
	Ready bool    `json:"ready"` // attaching was completed; if not, it was interrupted
	Agent process `json:"agent"`
}

// id names a pod's files and devices.
func (k Key) id() string {
	sum := sha256.Sum256([]byte(k.ContainerID + "\x00" + k.IfName))
	return hex.EncodeToString(sum[:6])
}

// underlay returns the name of a pod's underlay device. It has at most 15 octets, as the kernel demands.
func (k Key) underlay() string { return "ipo" + k.id() }

func (s *Service) recordPath(k Key) string  { return filepath.Join(s.opt.Dir, k.id()+".json") }
func (s *Service) configPath(k Key) string  { return filepath.Join(s.opt.Dir, k.id()+".yaml") }
func (s *Service) controlPath(k Key) string { return filepath.Join(s.opt.Dir, k.id()+".sock") }

// membersPath is the directory where the agent keeps its last good list of members.
func (s *Service) membersPath(k Key) string { return filepath.Join(s.opt.Dir, k.id()+".members") }

// save writes a pod's record, whole or not at all.
func (s *Service) save(p *pod) error {
	text, err := json.Marshal(p.record)
	if err != nil {
		return err
	}
	path := s.recordPath(p.Key)
	if err := os.WriteFile(path+".new", text, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// load returns the pods of an earlier run of the service.
func (s *Service) load() (pods []*pod, err error) {
	paths, err := filepath.Glob(filepath.Join(s.opt.Dir, "*.json"))
	if err != nil {
		return nil, err
	}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		p := &pod{}
		d := json.NewDecoder(bytes.NewReader(text))
		if err := d.Decode(&p.record); err != nil || s.recordPath(p.Key) != path {
			return nil, fmt.Errorf("%s is no record of a pod: remove it (%v)", path, err)
		}
		p.proc = p.Agent
		pods = append(pods, p)
	}
	return pods, nil
}

// identify notes which network namespace the pod's path leads to.
func (p *pod) identify() error {
	var st syscall.Stat_t
	if err := syscall.Stat(p.Netns, &st); err != nil {
		return fmt.Errorf("network namespace %s: %w", p.Netns, err)
	}
	p.Dev, p.Inode = uint64(st.Dev), st.Ino
	return nil
}

// vanished reports whether the pod's network namespace cannot be found any more. Other errors of its path
// are no reason to end the pod.
func (p *pod) vanished() bool {
	var st syscall.Stat_t
	if err := syscall.Stat(p.Netns, &st); err != nil {
		return errors.Is(err, fs.ErrNotExist)
	}
	return uint64(st.Dev) != p.Dev || st.Ino != p.Inode
}

// attach makes the pod's underlay, starts its agent and adds its routes.
func (s *Service) attach(ctx context.Context, p *pod) error {
	if err := s.underlay(p); err != nil {
		return err
	}
	if err := s.start(ctx, p); err != nil {
		return err
	}
	p.Ready = true
	return s.save(p)
}

// underlay makes a pod's underlay.
func (s *Service) underlay(p *pod) error {
	note, err := makeUnderlay(p.Master, p.underlay())
	if note != "" {
		s.log.Warn("a setting of the underlay cannot be made", "name", p.underlay(), "note", note)
	}
	return err
}

// start starts a pod's agent, waits until its interface is up, and adds the pod's routes.
func (s *Service) start(ctx context.Context, p *pod) (err error) {
	proc, ended, err := s.spawn(p)
	if err != nil {
		return fmt.Errorf("start an agent: %w", err)
	}
	p.proc, p.Agent = proc, proc
	if err := s.save(p); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, startWithin)
	defer cancel()
	if err := awaitAgent(ctx, s.controlPath(p.Key), ended); err != nil {
		return err
	}
	return addRoutes(p.Netns, p.IfName, p.Routes)
}

// detach undoes attach, as far as attach got. It goes on after errors, but keeps the pod's files if the
// agent or the underlay is still there.
func (s *Service) detach(p *pod) error {
	err := p.proc.end(stopWithin)
	if err != nil {
		err = fmt.Errorf("end the agent: %w", err)
	}
	p.proc = process{}
	if err = errors.Join(err, removeUnderlay(p.underlay())); err != nil {
		return err // the record stays, so that somebody tries again
	}
	for _, path := range []string{s.controlPath(p.Key), s.configPath(p.Key), s.membersPath(p.Key),
		s.recordPath(p.Key) + ".new", s.recordPath(p.Key)} {
		err = errors.Join(err, os.RemoveAll(path))
	}
	return err
}
