package softroce

import (
	"net/netip"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

// The kernel's structures are what they are on every architecture: an array of
// struct mmsghdr has no room between its elements but what size_t demands, and a
// control message begins where a size_t may.
func TestKernelStructures(t *testing.T) {
	const word = unsafe.Sizeof(uintptr(0))
	if got, want := unsafe.Sizeof(mmsghdr{}), unsafe.Sizeof(unix.Msghdr{})+word; got != want {
		t.Errorf("struct mmsghdr has %d octets, want %d", got, want)
	}
	if got := unsafe.Offsetof(mmsghdr{}.n); got != unsafe.Sizeof(unix.Msghdr{}) {
		t.Errorf("msg_len is at %d, want %d", got, unsafe.Sizeof(unix.Msghdr{}))
	}
	if got := unsafe.Offsetof(path{}.ctl) % word; got != 0 {
		t.Errorf("the control messages of a path are %d octets from where they may be", got)
	}
	if got := unsafe.Offsetof(receiver{}.ctls) % word; got != 0 {
		t.Errorf("the control messages of a receiver are %d octets from where they may be", got)
	}
}

// control finds every message, however long those before it are: the lengths
// here are those after which alignments to 4 and to 8 octets differ.
func TestControlMessages(t *testing.T) {
	r := &receiver{}
	at := 0
	put := func(level, typ int32, data []byte) {
		b, space := putCmsg(r.ctls[0][at:], level, typ, len(data))
		copy(b, data)
		at += space
	}
	u32 := func(v uint32) []byte { return native.AppendUint32(nil, v) }
	dst := netip.MustParseAddr("ff12:401b::1")
	put(unix.IPPROTO_IP, unix.IP_TOS, []byte{0x28})
	put(unix.IPPROTO_UDP, optUDPGRO, u32(1052))
	put(unix.SOL_SOCKET, unix.SO_RXQ_OVFL, u32(70000))
	put(unix.IPPROTO_IPV6, unix.IPV6_PKTINFO, append(dst.AsSlice(), u32(2)...))
	put(unix.IPPROTO_IPV6, unix.IPV6_HOPLIMIT, u32(7))
	r.msgs[0].hdr.SetControllen(at)
	var got meta
	r.control(0, &got)
	if want := (meta{dst: ib.GIDFromAddr(dst), segment: 1052, hopLimit: 7, class: 0x28, overflow: 70000}); got != want {
		t.Errorf("control messages: got %+v, want %+v", got, want)
	}
	// x/sys reads the same octets in the same way.
	all, err := unix.ParseSocketControlMessage(r.ctls[0][:at])
	if err != nil || len(all) != 5 {
		t.Errorf("x/sys sees %d control messages, error %v; want 5", len(all), err)
	}
}

// What a path gives the kernel is laid out as x/sys reads it.
func TestPathControlMessages(t *testing.T) {
	for _, tt := range []struct {
		name     string
		src, dst string
		want     [][3]int // level, type and length
	}{
		{"IPv4", "192.0.2.1", "192.0.2.2", [][3]int{
			{unix.IPPROTO_IP, unix.IP_PKTINFO, 12}, {unix.IPPROTO_IP, unix.IP_TOS, 4}, {unix.IPPROTO_IP, unix.IP_TTL, 4}, {unix.IPPROTO_UDP, optUDPSegment, 2}}},
		{"IPv6", "fd00::1", "fd00::2", [][3]int{
			{unix.IPPROTO_IPV6, unix.IPV6_PKTINFO, 20}, {unix.IPPROTO_IPV6, unix.IPV6_TCLASS, 4}, {unix.IPPROTO_IPV6, unix.IPV6_HOPLIMIT, 4}, {unix.IPPROTO_UDP, optUDPSegment, 2}}},
	} {
		p := &path{v6: tt.name == "IPv6", attr: verbs.AHAttr{SGID: gid(tt.src), DGID: gid(tt.dst), TrafficClass: 0x20, HopLimit: 7}}
		p.control()
		all, err := unix.ParseSocketControlMessage(p.ctl[:p.segLen])
		if err != nil || len(all) != len(tt.want) {
			t.Errorf("%s: %d control messages, error %v; want %d", tt.name, len(all), err, len(tt.want))
			continue
		}
		for i, m := range all {
			n := int(m.Header.Len) - unix.CmsgLen(0)
			if got := [3]int{int(m.Header.Level), int(m.Header.Type), n}; got != tt.want[i] {
				t.Errorf("%s: message %d has level, type and length %v, want %v", tt.name, i, got, tt.want[i])
			}
		}
		native.PutUint16(p.ctl[p.segAt:], 1052)
		if got := native.Uint16(all[len(all)-1].Data); got != 1052 {
			t.Errorf("%s: UDP_SEGMENT says %d, want 1052", tt.name, got)
		}
	}
}
