package hostnet

import (
	"encoding/binary"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Proxies returns the addresses that the host answers for on the device: those of
// "ip neigh add proxy". The kernel sends no notification of them, so whoever needs
// them asks now and then.
func (d *Device) Proxies() (addrs []netip.Addr, err error) {
	req := nl.NewNetlinkRequest(unix.RTM_GETNEIGH, unix.NLM_F_DUMP)
	req.AddRawData([]byte{unix.AF_UNSPEC, 0, 0, 0, 0, 0, 0, 0, 0, 0, unix.NTF_PROXY, 0})
	err = d.dump(req, unix.RTM_NEWNEIGH, func() { addrs = nil }, func(b []byte) {
		a, index, err := parseProxy(b)
		if err != nil {
			d.count.Malformed.Add(1)
		} else if a.IsValid() && (index == d.index || index == 0) {
			addrs = append(addrs, a)
		}
	})
	return addrs, wrap(err, "read proxy neighbors")
}

// parseProxy reads the body of an RTM_NEWNEIGH. The address is zero if the neighbour is no proxy.
// Index zero stands for every device.
func parseProxy(b []byte) (a netip.Addr, index int, err error) {
	const flags = 10 // offset of ndm_flags
	if len(b) < unix.SizeofNdMsg {
		return a, 0, errShort
	}
	err = eachAttr(b[unix.SizeofNdMsg:], func(typ int, v []byte) {
		if typ == unix.NDA_DST && b[flags]&unix.NTF_PROXY != 0 {
			a = addrOf(v)
		}
	})
	return a, int(binary.NativeEndian.Uint32(b[4:])), err
}
