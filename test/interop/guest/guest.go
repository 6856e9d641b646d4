// Package guest holds what runs inside the virtual machines: the init script,
// the verbs program in C, the kernel's part of a soft InfiniBand port, and (a program
// of its own) guestd, which starts
// commands for the host.
package guest

import "embed"

// Init is /init: it mounts, loads modules, sets the network up and becomes guestd.
//
//go:embed init
var Init []byte

// Peer is the source of the verbs program. It needs libibverbs.
//
//go:embed src/peer.c
var Peer []byte

// SoftIB is what a soft InfiniBand port needs beside the source of the kernel's Soft-RoCE.
//
//go:embed softib
var SoftIB embed.FS

// Port is the name of the virtual serial port between guestd and the host.
const Port = "ipoibcm.ctl"

// A ToGuest is one line of JSON from the host.
type ToGuest struct {
	Op   string   `json:"op"` // start, stdin, eof, kill
	ID   int      `json:"id"`
	Argv []string `json:"argv,omitempty"` // start
	Data []byte   `json:"data,omitempty"` // stdin
}

// A FromGuest is one line of JSON to the host: output of a command, its end, or
// (ID 0) that the guest is ready.
type FromGuest struct {
	ID   int    `json:"id"`
	Out  []byte `json:"out,omitempty"`
	Done bool   `json:"done,omitempty"`
	Exit int    `json:"exit,omitempty"` // 128 and the signal if there was one
}
