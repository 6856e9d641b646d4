package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/agent"
	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// A fdStore is the service manager's file-descriptor store, as sd_notify(3) has it. If the process has
// several interfaces, the name of each descriptor ends with owner.
type fdStore struct{ socket, owner string }

// ownerOf returns the suffix that the names in the store have if interface name shares its process with
// others.
func ownerOf(name string) string { return "@" + name }

// openStore returns the store, nil where the manager has none. systemd sets FDSTORE from version 254 on;
// before that the unit has to set it. owner is empty for the only interface of a process.
func openStore(owner string) agent.Store {
	socket := os.Getenv("NOTIFY_SOCKET")
	if n, err := strconv.Atoi(os.Getenv("FDSTORE")); err != nil || n <= 0 || socket == "" {
		return nil
	}
	return &fdStore{socket, owner}
}

// Put implements [agent.Store]. The manager does not watch the descriptors: a packet would wake it, and
// after an ICMP message about a socket it would close the socket.
func (s *fdStore) Put(name string, fds ...int) error {
	return s.send("FDSTORE=1\nFDNAME="+name+s.owner+"\nFDPOLL=0", fds)
}

// Remove implements [agent.Store].
func (s *fdStore) Remove(name string) error {
	return s.send("FDSTOREREMOVE=1\nFDNAME="+name+s.owner, nil)
}

func (s *fdStore) send(text string, fds []int) error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("notify the service manager: %w", err)
	}
	defer unix.Close(fd)
	patience := unix.NsecToTimeval(sendWithin.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &patience); err != nil {
		return fmt.Errorf("notify the service manager: %w", err)
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	if err := unix.Sendmsg(fd, []byte(text), rights, &unix.SockaddrUnix{Name: s.socket}, 0); err != nil {
		return fmt.Errorf("notify the service manager: %w", err)
	}
	return nil
}

// sendWithin bounds the wait for a manager that does not listen.
const sendWithin = time.Second

// A predecessor is what the process before left for this one.
type predecessor struct {
	agent.Predecessor
	sockets []int
	held    bool // the store had sockets, and closes them sooner or later
}

// heirs returns the descriptors that the service manager has kept, by owner. owners are the interfaces of
// this process. heirs closes all other descriptors, here and in the store: an interface that is no longer
// configured ends with its descriptors.
func heirs(files []*os.File, owners []string, open func(owner string) agent.Store,
	log *slog.Logger) map[string][]*os.File {
	all := map[string][]*os.File{}
	for _, f := range files {
		base, owner, found := strings.Cut(f.Name(), "@")
		if found {
			owner = ownerOf(owner)
		}
		if slices.Contains(owners, owner) {
			all[owner] = append(all[owner], f)
			continue
		}
		log.Warn("what the service manager has kept is of no interface of this process", "name", f.Name())
		f.Close()
		if store := open(owner); store != nil {
			if err := store.Remove(base); err != nil {
				log.Warn("the service manager was not told to let go of it", "name", f.Name(), "err", err)
			}
		}
	}
	return all
}

// predecessorOf returns the TUN, the sockets and the state that the service manager has kept of an
// interface. It closes what it cannot use, and logs why. It removes state and sockets from the store,
// because they are used once.
func predecessorOf(files []*os.File, store agent.Store, log *slog.Logger) (h predecessor) {
	var state *os.File
	for _, f := range files {
		base, _, _ := strings.Cut(f.Name(), "@")
		switch {
		case base == agent.StoreTUN && h.TUN == nil:
			h.TUN = f
			continue
		case base == agent.StoreState && state == nil:
			state = f
			continue
		case base == agent.StoreSockets:
			if fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0); err == nil {
				h.sockets, h.held = append(h.sockets, fd), true
			}
		default:
			log.Warn("a descriptor of the service manager's is not known", "name", f.Name())
		}
		f.Close()
	}
	if state != nil {
		var err error
		if h.State, err = agent.ReadState(state); err != nil {
			log.Warn("what the process before left is not used: neighbours are learnt anew", "err", err)
		}
		state.Close()
	}
	if h.State == nil {
		h.dropSockets()
	}
	if store != nil { // state and sockets are used once
		for _, name := range []string{agent.StoreState, agent.StoreSockets} {
			if err := store.Remove(name); err != nil {
				log.Warn("the store keeps what is used up", "name", name, "err", err)
			}
		}
	}
	return h
}

// suits closes the sockets if they are of another underlay.
func (h *predecessor) suits(underlay string) {
	if h.State != nil && h.State.Underlay != underlay {
		h.dropSockets()
	}
}

func (h *predecessor) dropSockets() {
	for _, fd := range h.sockets {
		unix.Close(fd)
	}
	h.sockets = nil
}

// guid returns the GUID of the process before, zero if there was none.
func (h *predecessor) guid() ib.GUID {
	if h.State == nil {
		return 0
	}
	return h.State.GUID
}

// releasedWithin bounds the wait until the store has closed a socket.
const releasedWithin = 2 * time.Second

// whenReleased opens a device. While the store still has the port, it tries again, for at most
// releasedWithin.
func (h *predecessor) whenReleased(open func() (verbs.Provider, error)) (verbs.Provider, error) {
	until := time.Now().Add(releasedWithin)
	for {
		dev, err := open()
		if !h.held || !errors.Is(err, syscall.EADDRINUSE) || time.Now().After(until) {
			return dev, err
		}
		time.Sleep(10 * time.Millisecond)
	}
}
