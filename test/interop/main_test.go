// Package interop lets our provider and our connection manager meet foreign
// ones: kernel Soft-RoCE (rdma_rxe), rdma-core's programs and the kernel's CM in
// a virtual machine, and tshark as judge of what both sides sent.
//
// It needs root, QEMU and the packages that vm.Open names; without them every
// test skips and says what is missing.
package interop

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/lab"
	"ipoibcm/provider/softroce"
	"ipoibcm/test/interop/vm"
	"ipoibcm/verbs"
)

// namePrefix begins the name of every namespace these tests make; the process
// ID follows.
const namePrefix = "ipio-"

// kernelVariable is the environment variable that says which series of Linux guests
// run, such as 6.12; empty is that of this release of Debian.
const kernelVariable = "IPOIBCM_KERNEL"

// Addresses of the one segment of a world.
const (
	hostIPv4  = "10.77.0.254"
	guestIPv4 = "10.77.0.1"
	guestIPv6 = "fe80::5054:ff:fe77:1"
)

// patience bounds every wait for something that should happen soon. Guests are
// emulated, and the machine may be busy.
const patience = 20 * time.Second

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(testMain(m))
}

func testMain(m *testing.M) int {
	lab.SweepKilled(namePrefix)
	defer closeWorlds()
	defer closeProducts()
	return m.Run()
}

// A world is a guest with rxe0 and a host namespace with eth0 on one segment.
type world struct {
	mtu  int
	seg  *vm.Segment
	host *lab.Host
	vm   *vm.VM
	img  *vm.Image
}

var worlds struct {
	sync.Mutex
	byMTU map[int]*world
	err   error
	image *vm.Image
}

// image returns what guests boot. It skips the test where none can be made.
func image(t *testing.T) *vm.Image {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("not root: no namespaces")
	}
	worlds.Lock()
	defer worlds.Unlock()
	if worlds.err == nil && worlds.image == nil {
		ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
		defer cancel()
		worlds.image, worlds.err = vm.Open(ctx, os.Getenv(kernelVariable))
	}
	var unreachable *vm.UnreachableError
	if errors.As(worlds.err, &unreachable) {
		t.Skip(unreachable)
	}
	var missing *vm.MissingError
	if errors.As(worlds.err, &missing) && os.Getenv("CI") != "true" {
		t.Skip(missing)
	}
	if worlds.err != nil {
		t.Fatal(worlds.err)
	}
	return worlds.image
}

// open returns the world of that underlay MTU, which tests share.
func open(t *testing.T, mtu int) *world {
	t.Helper()
	img := image(t)
	worlds.Lock()
	defer worlds.Unlock()
	if w := worlds.byMTU[mtu]; w != nil {
		return w
	}
	w, err := newWorld(img, mtu, fmt.Sprint(mtu))
	if err != nil {
		t.Fatal(err)
	}
	if worlds.byMTU == nil {
		worlds.byMTU = map[int]*world{}
	}
	worlds.byMTU[mtu] = w
	return w
}

// newWorld makes a world; name ends the name of its namespace.
func newWorld(img *vm.Image, mtu int, name string) (w *world, err error) {
	w = &world{mtu: mtu, seg: vm.NewSegment(), img: img}
	defer func() {
		if err != nil {
			w.close()
		}
	}()
	if w.host, err = lab.NewHost(fmt.Sprintf("%s%d-%s", namePrefix, os.Getpid(), name)); err != nil {
		return w, err
	}
	if err := w.seg.AddHost(w.host, "eth0", mac(0xfe), mtu); err != nil {
		return w, err
	}
	if err := w.host.AddAddr("eth0", hostIPv4+"/24"); err != nil {
		return w, err
	}
	return w, w.boot()
}

// boot starts the guest.
func (w *world) boot() (err error) {
	w.vm, err = vm.Boot(context.Background(), w.img, vm.Config{
		Name: "guest", Segment: w.seg, MAC: mac(1), MTU: w.mtu, IPv4: guestIPv4 + "/24",
		Modules: []string{"rdma_rxe", "rdma_ucm"},
	})
	return err
}

func mac(last byte) net.HardwareAddr { return net.HardwareAddr{0x52, 0x54, 0, 0x77, 0, last} }

func (w *world) close() {
	if w.vm != nil {
		w.vm.Kill()
	}
	w.seg.Close()
	if w.host != nil {
		w.host.Close()
	}
}

func closeWorlds() {
	worlds.Lock()
	defer worlds.Unlock()
	for _, w := range worlds.byMTU {
		w.close()
	}
}

// device opens our provider on the host's eth0.
func (w *world) device(t *testing.T, opts softroce.Options) *softroce.Device {
	t.Helper()
	opts.Underlay = "eth0"
	var d *softroce.Device
	if err := w.host.Do(func() (err error) {
		d, err = softroce.Open(opts)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

// A family is one of the two kinds of GID: the host's and the guest's, and the
// index of the guest's in its table.
type family struct {
	name        string
	host, guest ib.GID
	index       int
}

// families returns both; GIDs of the guest are chosen by address.
func (w *world) families(t *testing.T) []family {
	t.Helper()
	ll, err := w.host.LinkLocal("eth0")
	if err != nil {
		t.Fatal(err)
	}
	out, err := w.vm.Sh(patience, "cd /sys/class/infiniband/rxe0/ports/1/gids; for i in 0 1 2 3; do cat $i; done")
	if err != nil {
		t.Fatal(err)
	}
	fams := []family{
		{name: "IPv6", host: ib.GIDFromAddr(ll), guest: gid(guestIPv6), index: -1},
		{name: "IPv4", host: gid(hostIPv4), guest: gid(guestIPv4), index: -1},
	}
	for i, l := range strings.Fields(out) {
		g, err := ib.ParseGID(l)
		if err != nil {
			t.Fatalf("GID table of the guest: %q", out)
		}
		for j := range fams {
			if fams[j].guest == g {
				fams[j].index = i
			}
		}
	}
	for _, f := range fams {
		if f.index < 0 {
			t.Fatalf("the guest has no GID %v:\n%s", f.guest, out)
		}
	}
	return fams
}

func gid(addr string) ib.GID { return ib.GIDFromAddr(netip.MustParseAddr(addr)) }

// mtuName names the subtests of one underlay MTU after the IB MTU it gives.
func mtuName(mtu int) string { return fmt.Sprintf("MTU%d", pathMTU(mtu).Octets()) }

// pathMTU is what both sides make of an underlay MTU.
func pathMTU(mtu int) ib.MTU {
	if mtu >= 4096+96 {
		return ib.MTU4096
	}
	return ib.MTU1024
}

// underlays are the MTUs of the underlay that tests run with.
var underlays = []int{1500, 5000}

// eachFamily runs f for both kinds of GID over both underlay MTUs.
func eachFamily(t *testing.T, f func(t *testing.T, w *world, fam family)) {
	for _, mtu := range underlays {
		t.Run(mtuName(mtu), func(t *testing.T) {
			w := open(t, mtu)
			for _, fam := range w.families(t) {
				t.Run(fam.name, func(t *testing.T) { f(t, w, fam) })
			}
		})
	}
}

// explain ends what a failed test left running in the guest, and logs what it said, what
// each side counted, and what the guest's kernel has to say.
func (w *world) explain(t *testing.T, d verbs.Provider, proc *vm.Proc) {
	t.Helper()
	proc.Kill()
	_, _ = proc.Wait(time.Second)
	var ours strings.Builder
	d.Counters(func(name string, v uint64) {
		if v != 0 {
			fmt.Fprintf(&ours, " %s %d", name, v)
		}
	})
	theirs, err := w.vm.Sh(patience,
		"cd /sys/class/infiniband/rxe0/ports/1/hw_counters; for f in *; do echo -n \"$f $(cat $f) \"; done; echo; cat "+
			"/proc/loadavg; dmesg | tail -30")
	if err != nil {
		theirs += fmt.Sprintf("the guest does not answer: %v", err)
	}
	t.Logf("the program in the guest:\n%s\nwe counted:%s\nthe guest:\n%s", proc.Output(), ours.String(), theirs)
}

// counter returns one of the device's counters.
func counter(t *testing.T, d verbs.Provider, name string) (value uint64) {
	t.Helper()
	found := false
	d.Counters(func(n string, v uint64) {
		if n == name {
			value, found = v, true
		}
	})
	if !found {
		t.Fatalf("no counter %s", name)
	}
	return value
}
