package pcapng_test

import (
	"bytes"
	"encoding/hex"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"ipoibcm/internal/expect"
	"ipoibcm/internal/vector"
	"ipoibcm/wire/pcapng"
	"ipoibcm/wire/pcapng/pcapngtest"
)

var unhex = vector.Hex

// RoCEv2 packets: an ARP request by UD over IPv4 (with its ICRC), and UD over
// IPv6 to a group with no payload worth the name.
var (
	arpOverUD = unhex("45000070000040004011b679c0000201c0000202c12312b7005c00006400ffff00ffffff00000007" +
		"00000b1b000001230806000000200800140400018000012300000000000000000000ffffc00002010a00000100000000" +
		"000000000000000000000000000000000a000002b15cd6b8")
	udOverV6 = unhex("600000000040114020010db800000000000000000000000120010db8000000000000000000000002" +
		"c12312b7004000006400ffff000004560000000900000b1b00000123080000004500001c00010000400166de0a000001" +
		"0a0000020800f7ff00000000686d5c1c")
)

func capture() ([]byte, time.Time) {
	at := time.Date(2026, 11, 21, 3, 4, 5, 123456789, time.UTC)
	b := pcapng.AppendHeader(nil, "ipoibcmd")
	b = pcapng.AppendInterface(b, pcapng.Interface{Name: "eth0", Description: "host a"})
	b = pcapng.AppendInterface(b, pcapng.Interface{Name: "eth0", SnapLen: 60})
	b = pcapng.AppendPacket(b, 0, at, true, arpOverUD, len(arpOverUD), 0)
	b = pcapng.AppendPacket(b, 0, at.Add(time.Nanosecond), false, udOverV6, len(udOverV6), 0)
	b = pcapng.AppendPacket(b, 1, at.Add(time.Second), false, arpOverUD, len(arpOverUD), 60)
	return b, at
}

func TestRoundTrip(t *testing.T) {
	b, at := capture()
	c, err := pcapngtest.Read(b)
	if err != nil {
		t.Fatal(err)
	}
	expect.Equal(t, c.Application, "ipoibcmd", "Application")
	expect.MustEqual(t, len(c.Interfaces), 2, "length of Interfaces")
	expect.Equal(t, c.Interfaces[0].Name, "eth0", "Interfaces[0].Name")
	expect.Equal(t, c.Interfaces[0].Description, "host a", "Interfaces[0].Description")
	expect.Equal(t, c.Interfaces[0].SnapLen, pcapng.DefaultSnapLen, "Interfaces[0].SnapLen")
	for i, want := range []struct {
		id, kept, orig int
		out            bool
		at             time.Time
		eth            string
	}{
		{0, 14 + 112, 14 + 112, true, at, "0249c00002020249c00002010800"},
		{0, 14 + 104, 14 + 104, false, at.Add(time.Nanosecond), "02490000000202490000000186dd"},
		{1, 60, 14 + 112, false, at.Add(time.Second), "0249c00002020249c00002010800"},
	} {
		p := c.Packets[i]
		expect.Equal(t, p.Interface, want.id, "packet %d: Interface", i)
		expect.Equal(t, len(p.Data), want.kept, "packet %d: length of Data", i)
		expect.Equal(t, p.OrigLen, want.orig, "packet %d: OrigLen", i)
		expect.Equal(t, p.Out, want.out, "packet %d: Out", i)
		expect.Equal(t, p.Time.Equal(want.at), true, "packet %d: Time.Equal(want.at)", i)
		if got := hex.EncodeToString(p.Data[:pcapng.EthernetLen]); got != want.eth {
			t.Errorf("packet %d: Ethernet header %s, want %s", i, got, want.eth)
		}
	}
	if !bytes.Equal(c.Packets[0].Data[pcapng.EthernetLen:], arpOverUD) {
		t.Error("the IP packet is not the one written")
	}
}

func TestEthernet(t *testing.T) {
	v4 := func(dst ...byte) []byte {
		b := bytes.Clone(arpOverUD)
		copy(b[16:], dst)
		return b
	}
	v6 := bytes.Clone(udOverV6)
	copy(v6[24:], unhex("ff12401bffff000000000000ffffffff"))
	for _, tt := range []struct {
		name string
		ip   []byte
		want string // destination, source, type
	}{
		{"IPv4 group, 23 bits", v4(239, 192, 255, 255), "01005e40ffff0249c00002010800"},
		{"limited broadcast", v4(255, 255, 255, 255), "ffffffffffff0249c00002010800"},
		{"IPv6 group, 32 bits", v6, "3333ffffffff02490000000186dd"},
		{"no IP at all", []byte{1, 2, 3}, "0000000000000000000000000000"},
		{"cut short", arpOverUD[:19], "0000000000000000000000000000"},
	} {
		h := pcapng.Ethernet(tt.ip)
		if got := hex.EncodeToString(h[:]); got != tt.want {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
		}
	}
}

func TestSnapShorterThanEthernet(t *testing.T) {
	b := pcapng.AppendInterface(pcapng.AppendHeader(nil, "x"), pcapng.Interface{})
	for snap := 1; snap < 20; snap++ {
		c, err := pcapngtest.Read(pcapng.AppendPacket(b[:len(b):len(b)], 0, time.Unix(1, 0), true, arpOverUD, len(arpOverUD), snap))
		if err != nil || len(c.Packets[0].Data) != snap {
			t.Fatalf("snap length %d: %v, %+v", snap, err, c)
		}
	}
}

func TestPacketsDoNotAllocate(t *testing.T) {
	buf := make([]byte, 0, 4096)
	now := time.Unix(1, 0)
	if n := testing.AllocsPerRun(100, func() { buf = pcapng.AppendPacket(buf[:0], 0, now, true, arpOverUD, len(arpOverUD), 0) }); n != 0 {
		t.Errorf("%v allocations per packet, want none", n)
	}
}

// Wireshark's own reader is the judge.
func TestTshark(t *testing.T) {
	tshark, err := exec.LookPath("tshark")
	if err != nil {
		t.Skip("tshark is not installed: captures were not shown to it")
	}
	b, _ := capture()
	file := filepath.Join(t.TempDir(), "x.pcapng")
	if err := os.WriteFile(file, b, 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(tshark, "-n", "-r", file, "-T", "fields", "-E", "separator=|", "-e",
		"frame.time_epoch", "-e", "frame.interface_name", "-e", "frame.cap_len", "-e", "frame.packet_flags_direction",
		"-e", "infiniband.deth.q_key").Output()
	if err != nil {
		t.Fatalf("tshark: %v", err)
	}
	got := strings.Fields(string(out))
	for i, want := range [][]string{
		{"123456789", "|eth0|126|", "2", "b1b"}, {"123456790", "|eth0|118|", "1", "b1b"}, {"123456789", "|eth0|60|", "1"},
	} {
		for _, s := range want {
			if i >= len(got) || !strings.Contains(got[i], s) {
				t.Fatalf("line %d lacks %q:\n%s", i, s, out)
			}
		}
	}
}
