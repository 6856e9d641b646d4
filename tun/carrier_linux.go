package tun

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// SetCarrier sets whether the interface has a carrier, as a card with a cable has. Without a
// carrier the kernel shows the interface without LOWER_UP and its IPv4 routes as linkdown, and
// gives out no packet; addresses and routes stay. A new File has a carrier. Kernels before 5.0
// cannot do that; the error is then unix.EINVAL.
func (t *File) SetCarrier(on bool) error {
	t.use.RLock()
	defer t.use.RUnlock()
	if t.shut.Load() {
		return os.ErrClosed
	}
	v := 0
	if on {
		v = 1
	}
	if err := unix.IoctlSetPointerInt(t.fd, unix.TUNSETCARRIER, v); err != nil {
		return fmt.Errorf("set carrier of %s: %w", t.name, err)
	}
	return nil
}
