// Package fleet is the vocabulary that all of Carrel's services speak: plain values, the rules that hold within one value, and the kinds of error. It does no I/O and never reads the clock.
package fleet
