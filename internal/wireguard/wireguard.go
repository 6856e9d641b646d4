// Package wireguard builds wireguard-go and sets its tunnels up, for tests and for the
// benchmark. It does not start the program: the caller does, in a namespace.
package wireguard

import (
	"bufio"
	"context"
	"crypto/ecdh"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"time"

	"ipoibcm/internal/gotool"
)

// Socket returns the control socket of the tunnel of that name, which is visible to all
// network namespaces.
func Socket(name string) string { return filepath.Join("/var/run/wireguard", name+".sock") }

// Version is the release of wireguard-go that is used.
const Version = "v0.0.0-20260522210424-ecfc5a8d5446"

// Port is the UDP port of both ends.
const Port = 51820

// Build returns the wireguard-go program, built into a directory if it is not there yet.
func Build(ctx context.Context, cache string) (string, error) {
	return gotool.Program{Module: "golang.zx2c4.com/wireguard", Version: Version, Package: "."}.Build(ctx, cache)
}

// A Peer is what the configuration of one end says about another end.
type Peer struct {
	Key      *ecdh.PublicKey
	Endpoint netip.AddrPort
	Allowed  netip.Prefix
}

// Configure gives the end with the control socket its private key and its peers, as wg(8) would.
func Configure(ctx context.Context, socket string, own *ecdh.PrivateKey, peers ...Peer) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	var conn net.Conn
	for {
		var err error
		if conn, err = new(net.Dialer).DialContext(ctx, "unix", socket); err == nil {
			break
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wireguard-go does not listen: %w", err)
		case <-time.After(5 * time.Millisecond):
		}
	}
	defer conn.Close()
	set := fmt.Sprintf("set=1\nprivate_key=%s\nlisten_port=%d\nreplace_peers=true\n",
		hex.EncodeToString(own.Bytes()), Port)
	for _, p := range peers {
		set += fmt.Sprintf("public_key=%s\nendpoint=%s\nallowed_ip=%s\n", hex.EncodeToString(p.Key.Bytes()),
			p.Endpoint, p.Allowed)
	}
	if _, err := fmt.Fprint(conn, set+"\n"); err != nil {
		return err
	}
	answer, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil || answer != "errno=0\n" {
		return fmt.Errorf("wireguard-go refuses its configuration: %q (%v)", answer, err)
	}
	return nil
}

// TestKeys returns the private keys of two ends. They are made from the numbers 1 and 2, and
// are therefore good for tests only.
func TestKeys() (keys [2]*ecdh.PrivateKey, err error) {
	for i := range keys {
		raw := make([]byte, 32)
		raw[31] = byte(1 + i)
		if keys[i], err = ecdh.X25519().NewPrivateKey(raw); err != nil {
			return keys, err
		}
	}
	return keys, nil
}
