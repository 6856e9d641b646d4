package wireguard

import (
	"crypto/ecdh"
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/mdlayher/genetlink"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// ConfigureKernel gives a WireGuard device of the kernel, in the caller's network
// namespace, its private key and its peers (include/uapi/linux/wireguard.h).
func ConfigureKernel(device string, own *ecdh.PrivateKey, peers ...Peer) error {
	c, err := genetlink.Dial(nil)
	if err != nil {
		return err
	}
	defer c.Close()
	family, err := c.GetFamily(unix.WG_GENL_NAME)
	if err != nil {
		return fmt.Errorf("WireGuard of the kernel: %w", err)
	}
	b, err := attributes(device, own, peers)
	if err != nil {
		return err
	}
	_, err = c.Execute(genetlink.Message{Header: genetlink.Header{Command: unix.WG_CMD_SET_DEVICE,
		Version: unix.WG_GENL_VERSION}, Data: b},
		family.ID, netlink.Request|netlink.Acknowledge)
	if err != nil {
		return fmt.Errorf("configure %s: %w", device, err)
	}
	return nil
}

func attributes(device string, own *ecdh.PrivateKey, peers []Peer) ([]byte, error) {
	e := netlink.NewAttributeEncoder()
	e.String(unix.WGDEVICE_A_IFNAME, device)
	e.Bytes(unix.WGDEVICE_A_PRIVATE_KEY, own.Bytes())
	e.Uint16(unix.WGDEVICE_A_LISTEN_PORT, Port)
	e.Uint32(unix.WGDEVICE_A_FLAGS, unix.WGDEVICE_F_REPLACE_PEERS)
	e.Nested(unix.WGDEVICE_A_PEERS, func(e *netlink.AttributeEncoder) error {
		for i, p := range peers {
			e.Nested(uint16(i), func(e *netlink.AttributeEncoder) error {
				e.Bytes(unix.WGPEER_A_PUBLIC_KEY, p.Key.Bytes())
				e.Bytes(unix.WGPEER_A_ENDPOINT, sockaddr(p.Endpoint))
				e.Nested(unix.WGPEER_A_ALLOWEDIPS, func(e *netlink.AttributeEncoder) error {
					e.Nested(0, func(e *netlink.AttributeEncoder) error {
						allowed(e, p.Allowed)
						return nil
					})
					return nil
				})
				return nil
			})
		}
		return nil
	})
	return e.Encode()
}

func allowed(e *netlink.AttributeEncoder, p netip.Prefix) {
	family := uint16(unix.AF_INET6)
	if p.Addr().Is4() {
		family = unix.AF_INET
	}
	e.Uint16(unix.WGALLOWEDIP_A_FAMILY, family)
	e.Bytes(unix.WGALLOWEDIP_A_IPADDR, p.Addr().AsSlice())
	e.Uint8(unix.WGALLOWEDIP_A_CIDR_MASK, uint8(p.Bits()))
}

// sockaddr returns a as a struct sockaddr_in or sockaddr_in6.
func sockaddr(a netip.AddrPort) []byte {
	if a.Addr().Is4() {
		b := binary.BigEndian.AppendUint16(binary.NativeEndian.AppendUint16(nil, unix.AF_INET), a.Port())
		return append(append(b, a.Addr().AsSlice()...), make([]byte, 8)...)
	}
	b := binary.BigEndian.AppendUint16(binary.NativeEndian.AppendUint16(nil, unix.AF_INET6), a.Port())
	return append(append(append(b, 0, 0, 0, 0), a.Addr().AsSlice()...), 0, 0, 0, 0)
}
