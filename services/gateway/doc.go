// Package gateway wires the gateway: store, scheduler, links, handlers, routes and limits, and the order in which they start and stop.
package gateway
