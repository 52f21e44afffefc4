// @node-idempotency/nestjs. Its decorators are called as functions, to do without a compiler.
// Prints its port.
require('reflect-metadata');
const { Body, Controller, Get, Headers, HttpException, Module, Param, Post, UseInterceptors } =
  require('@nestjs/common');
const { NestFactory } = require('@nestjs/core');
const { NodeIdempotencyInterceptor, NodeIdempotencyModule } = require('@node-idempotency/nestjs');
const { StorageAdapterEnum } = require('@node-idempotency/shared');
const orders = require('./orders');

class Orders {
  count() {
    return orders.count();
  }

  release(operation) {
    return orders.release(operation);
  }

  async create(order, handler) {
    const { status, body } = await orders.create(order.operation, handler);
    if (status !== 201) throw new HttpException(body, status);
    return body;
  }
}

function decorate(method, ...decorators) {
  const property = Object.getOwnPropertyDescriptor(Orders.prototype, method);
  decorators.forEach((decorator) => decorator(Orders.prototype, method, property));
}
Body()(Orders.prototype, 'create', 0);
Headers('handler')(Orders.prototype, 'create', 1);
decorate('create', Post('orders'), UseInterceptors(NodeIdempotencyInterceptor));
Param('operation')(Orders.prototype, 'release', 0);
decorate('release', Get('release/:operation'));
decorate('count', Get('orders'));
Controller()(Orders);

class App {}
const storage = { adapter: StorageAdapterEnum.memory };
Module({
  imports: [NodeIdempotencyModule.forRootAsync({ storage })],
  controllers: [Orders],
})(App);

NestFactory.create(App, { logger: ['fatal'] })
  .then((app) => app.init())
  .then((app) => orders.serve(app.getHttpServer()));
