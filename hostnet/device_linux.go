package hostnet

import (
	"errors"
	"net/netip"
)

var errTODO = errors.New("hostnet: coming")

// A Device is one network device, watched.
type Device struct {
	index  int
	events chan Event
}

// Open starts to watch the device with this interface index. The first event is
// a Resync.
func Open(ifindex int) (*Device, error) { return nil, errTODO }

// Close ends the watch and closes Events. It leaves routes and addresses alone.
func (d *Device) Close() error { return errTODO }

// Events is the one channel of changes: addresses, routes through the device in
// every table, the link itself. It is bounded; when its reader lags, what was
// not read yet is replaced by one Resync.
func (d *Device) Events() <-chan Event { return d.events }

// Snapshot reads everything anew, past the event channel.
func (d *Device) Snapshot() (Snapshot, error) { return Snapshot{}, errTODO }

// SetUp sets the device up or down.
func (d *Device) SetUp(up bool) error { return errTODO }

// SetMTU sets the device MTU in octets.
func (d *Device) SetMTU(mtu int) error { return errTODO }

// DisableAddrGen sets addr_gen_mode none: the kernel makes no link-local address.
func (d *Device) DisableAddrGen() error { return errTODO }

// IgnoreRAMTU sets accept_ra_mtu 0: an MTU option in an RA changes nothing.
func (d *Device) IgnoreRAMTU() error { return errTODO }

// SetSysctl writes net/<family>/conf/<device>/<key>, family "ipv4" or "ipv6".
func (d *Device) SetSysctl(family, key, value string) error { return errTODO }

// AddAddr puts an address with its prefix length on the device. One that is
// there already is no error.
func (d *Device) AddAddr(p netip.Prefix) error { return errTODO }

// DelAddr removes an address. ErrNotFound if it is not there.
func (d *Device) DelAddr(p netip.Prefix) error { return errTODO }

// SetRoute makes r so: it is added, or replaces the route with the same Key. A
// Route that came from an Event or Snapshot can be given back with other MTU and
// AdvMSS; everything else of it is kept.
func (d *Device) SetRoute(r Route) error { return errTODO }

// DelRoute removes the route with r's Key. ErrNotFound if it is not there.
func (d *Device) DelRoute(r Route) error { return errTODO }

// RemoveOurs removes every route of the device whose protocol is [Protocol] and
// returns how many: at exit, and at start after a crash.
func (d *Device) RemoveOurs() (int, error) { return 0, errTODO }

// FlushExceptions makes the kernel forget the path MTUs it has learned, all for
// IPv4 and those of the device for IPv6.
func (d *Device) FlushExceptions() error { return errTODO }

// Groups returns the multicast groups that the kernel has joined on the device.
func (d *Device) Groups() ([]netip.Addr, error) { return nil, errTODO }

// Counters are the device's counts of what went wrong and was repaired.
type Counters struct {
	Resyncs     uint64 // snapshots delivered, the first included
	Overflows   uint64 // netlink socket overran (ENOBUFS)
	Lagged      uint64 // the reader of Events was too slow
	DumpRetries uint64 // dumps that the kernel called interrupted
	Multipath   uint64 // multipath routes seen and left out
	Malformed   uint64 // netlink messages that could not be read
}

// Counters returns the counts so far.
func (d *Device) Counters() Counters { return Counters{} }

// An Info is what is known about a device that may serve as underlay.
type Info struct {
	Link     Link
	Addrs    []Addr
	Driver   string          // "mlx5_core", "veth"; "" if unknown
	Speed    int             // Mbit/s, 0 if unknown
	Features map[string]bool // ethtool features, among them tx-udp-segmentation, rx-gro
	RDMA     []string        // RDMA devices on it: "mlx5_0", "rxe0"
}

// Lookup returns the link with this name.
func Lookup(name string) (Link, error) { return Link{}, errTODO }

// Underlay returns what is known of the device with this name.
func Underlay(name string) (Info, error) { return Info{}, errTODO }

// Devices returns all devices of the namespace, in order of their index.
func Devices() ([]Info, error) { return nil, errTODO }
