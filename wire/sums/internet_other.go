//go:build !amd64 || purego

package sums

// canAdd says whether addWords is there.
var canAdd = false

func addWords([]byte) uint64 { panic("sums: no vector instructions") }
