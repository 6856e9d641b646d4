package redact

import "testing"

// What is no identifier stays.
func TestText(t *testing.T) {
	for _, tt := range []struct{ in, want string }{
		{"10.0.0.2 is at 80 8129ab fe80::4cd9:c6ff:fe53:dc2", "10.0.0.2 is at 80 redacted fe80::4cd9:c6ff:fe53:dc2"},
		{"sent REQ comm=5eadc0de qpn=0x8129ab service=RFC/8129ab reason=10 (stale)",
			"sent REQ redacted redacted redacted reason=10 (stale)"},
		{"REQ rejected, invalid MTU: path MTU 4096 is more than ours of 1024",
			"REQ rejected, invalid MTU: path MTU 4096 is more than ours of 1024"},
		{"joining ff12:401b:8001::ffff:ffff", "joining redacted::ffff:ffff"},
		{"fd00:db8:aaaa:bbbb:cccc:dddd:eeee:ffff, 255.255.255.255/32",
			"fd00:db8:aaaa:bbbb:cccc:dddd:eeee:ffff, 255.255.255.255/32"},
		{"P_Key 0x8001", "P_Key redacted"},
		{"", ""},
	} {
		if got := Text(tt.in); got != tt.want {
			t.Errorf("%q became %q, want %q", tt.in, got, tt.want)
		}
	}
}
