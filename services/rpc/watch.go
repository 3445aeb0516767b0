package rpc

import "context"

// Topic is what a Watch stream looks at.
type Topic string

// The topics of Watch streams; a workspace's changes come under its id.
const (
	TopicWorkspaces Topic = "workspaces"
	TopicHosts      Topic = "hosts"
	TopicDevices    Topic = "devices"
	TopicPools      Topic = "pools"
)

// Watcher wakes a Watch stream.
type Watcher interface {
	// Each calls send at once, then after every change of the topic (several changes may be one call) and at least every keep-alive
	// interval, until ctx ends or send fails.
	Each(ctx context.Context, topic Topic, send func() error) error
}
