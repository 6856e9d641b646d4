package tun

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Namespace opens the network namespace that the interface is in now, for the caller to
// close, and returns the interface's name there: "ip link set DEV netns X name Y" moves a
// TUN like any device, and its File goes on. The error is os.ErrNotExist once the
// interface has been removed, and errors.ErrUnsupported on kernels before 5.7.
func (t *File) Namespace() (fd int, name string, err error) {
	t.use.RLock()
	defer t.use.RUnlock()
	if t.shut.Load() {
		return -1, "", os.ErrClosed
	}
	// TUNGETDEVNETNS waits for a move under way, so the name is that before the move or after it.
	fd, err = unix.IoctlRetInt(t.fd, unix.TUNGETDEVNETNS)
	switch {
	case errors.Is(err, unix.EBADFD):
		return -1, "", os.ErrNotExist
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOTTY):
		return -1, "", fmt.Errorf("find the network namespace of %s: %w (Linux 5.7 or later is needed)", t.name,
			errors.ErrUnsupported)
	case err != nil:
		return -1, "", fmt.Errorf("find the network namespace of %s: %w", t.name, err)
	}
	ifr, err := request(t.fd, unix.TUNGETIFF, "", 0)
	if err != nil {
		return -1, "", errors.Join(fmt.Errorf("find the name of %s: %w", t.name, err), unix.Close(fd))
	}
	return fd, ifr.Name(), nil
}
